"""The arena: a preallocated file of extents, read and written with direct I/O."""
