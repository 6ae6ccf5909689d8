"""The nvme tier: an arena file that holds the data, and an index of its extents."""
