"""The records of a store: list, change and count them."""
