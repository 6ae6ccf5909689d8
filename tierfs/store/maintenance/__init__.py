"""Upkeep of a store over the years: garbage collection, scrubbing and repair."""
