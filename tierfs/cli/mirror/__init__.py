"""Make a local directory equal to a directory in a store, or the other way round."""
