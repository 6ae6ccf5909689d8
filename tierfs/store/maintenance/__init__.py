"""Maintenance of a store: garbage collection, scrubbing and repair."""
