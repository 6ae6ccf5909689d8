"""Clean copies of chunks in the local tiers: read, kept, dropped."""
