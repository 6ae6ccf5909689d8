"""The ram tier: segments of shared memory, and who may write where in them."""
