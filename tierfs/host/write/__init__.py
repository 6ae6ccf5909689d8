"""Writing into the ram tier: chunks and records are sealed, and the flusher is told."""
