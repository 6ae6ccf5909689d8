"""The device tier: snapshots in GPU memory, their drain into the ram tier, and kernels that hash and transform blocks.

All modules can be imported without a GPU. They need torch; only the kernels need CuPy.
"""

from tierfs.device.drain import Drain, Gate
from tierfs.device.tier import DeviceTier

__all__ = ["DeviceTier", "Drain", "Gate"]
