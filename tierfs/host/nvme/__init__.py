"""The nvme tier: one arena file of extents, and the index beside it."""
