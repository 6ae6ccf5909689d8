"""Object tiers that take another one and add to it: retries, limits, counters, verification."""
