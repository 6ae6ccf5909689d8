"""Messages between a process and its host's flusher."""
