"""A log of the gradients of each step, and the way back: make the steps after a checkpoint again, bit for bit."""
