"""What keeps a store in order over the years: garbage collection, scrubbing, repair, and which checkpoints to keep."""
