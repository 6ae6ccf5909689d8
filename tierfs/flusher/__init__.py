"""The flusher: the one process of a host that moves what was staged down to the nvme and the object tier."""
