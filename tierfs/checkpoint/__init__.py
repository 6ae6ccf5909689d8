"""Tools on whole checkpoints: list, verify, compare, export, import."""
