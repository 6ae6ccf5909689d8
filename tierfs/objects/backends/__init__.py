"""One module per kind of object tier, and modules that several of them share."""
