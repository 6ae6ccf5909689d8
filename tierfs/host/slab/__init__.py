"""The ram tier: segments of shared memory and the rules for writing into them."""
