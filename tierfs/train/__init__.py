"""Training with tierfs: what sits above the checkpoint writer and below the user's own loop.

Importing this package imports no torch; its modules do.
"""
