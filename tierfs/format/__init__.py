"""Encode and decode the store format of docs/reference/FORMAT.md, without input or output."""
