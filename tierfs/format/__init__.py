"""Bytes to values and back, with no input or output: the store format of docs/reference/FORMAT.md."""
