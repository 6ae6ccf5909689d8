"""The host's own tiers: shared memory and a local disk, who uses them, and how much of them may be used."""
