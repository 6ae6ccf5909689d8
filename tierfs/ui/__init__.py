"""A read-only web page of stores, served by ``tierfs ui``. Its figures come from the functions that the commands call."""
