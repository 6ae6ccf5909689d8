"""Where the tensors of a file lie, by the table that the file itself has."""
