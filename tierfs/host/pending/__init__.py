"""What was saved on this host and is not in the object tier yet."""
