"""The host's local tiers, its pending changes, and the messages between its processes and the flusher."""
