"""The device tier: snapshots in GPU memory, their drain into the ram tier, and kernels that hash and transform there.

Everything imports and works without a GPU; CuPy is needed for the kernels alone, torch for all else.
"""

from tierfs.device.drain import Drain, Gate
from tierfs.device.tier import DeviceTier

__all__ = ["DeviceTier", "Drain", "Gate"]
