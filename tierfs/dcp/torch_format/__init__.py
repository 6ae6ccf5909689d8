"""Checkpoints in the format of torch's own writers."""
