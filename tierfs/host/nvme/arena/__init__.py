"""One preallocated file of extents, and how it is read and written."""
