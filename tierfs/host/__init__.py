"""The host's own tiers, what is pending on it, and how its processes talk to the flusher."""
