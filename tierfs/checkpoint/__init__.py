"""Tools for whole checkpoints: list, verify, compare, export, import."""
