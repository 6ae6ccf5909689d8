"""Codecs against a base: differences, sparse differences, and what follows from the base."""
