"""Keep a directory of this host equal to a directory in a store, in one direction or the other."""
