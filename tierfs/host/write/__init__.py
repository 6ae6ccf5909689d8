"""Writes into the ram tier: seals chunks and drafts, and notifies the flusher."""
