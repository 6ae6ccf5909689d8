"""Files that were saved on this host and are not in the object tier yet."""
