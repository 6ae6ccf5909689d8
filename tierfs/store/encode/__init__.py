"""How chunks are encoded on their way to the object tier."""
