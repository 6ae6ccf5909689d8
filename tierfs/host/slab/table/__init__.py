"""The table of a segment: its bytes, who may change them, what one process saw, and which slots are free."""
