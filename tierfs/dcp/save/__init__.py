"""From a rank's tensors to its shard file."""
