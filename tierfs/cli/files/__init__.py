"""Find the files that arguments name; copy, move and remove them."""
