"""From bytes to chunks and a manifest."""
