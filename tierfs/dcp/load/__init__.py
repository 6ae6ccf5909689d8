"""Read shard files into the tensors that a load plan requests."""
