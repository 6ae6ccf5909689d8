"""Codecs against a base: differences, sparse differences, and elements that follow from the base."""
