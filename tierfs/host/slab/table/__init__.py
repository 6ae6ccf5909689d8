"""The slot table of a segment: its byte layout, its lock, a cached view of it, and the allocator of free slots."""
