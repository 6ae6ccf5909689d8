"""The flusher: the one process per host and store that moves staged changes to the nvme tier and the object tier."""
