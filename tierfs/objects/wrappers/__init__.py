"""Object tiers that wrap another one and add retries, limits, counters or verification."""
