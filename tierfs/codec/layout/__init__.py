"""Find the tensors of a file by the file's own table."""
