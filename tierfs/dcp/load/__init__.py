"""From shard files to the tensors that a load plan asks for."""
