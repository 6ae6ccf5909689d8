"""Encode chunks for the object tier."""
