"""One module per kind of object tier, and what several of them share."""
