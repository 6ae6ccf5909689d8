"""Write a rank's tensors and objects to its shard file."""
