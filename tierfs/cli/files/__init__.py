"""Find the files that arguments name, and copy, move and remove them."""
