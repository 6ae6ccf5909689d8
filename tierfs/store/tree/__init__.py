"""The records of a store: listed, changed, counted."""
