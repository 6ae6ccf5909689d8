"""Offload what autograd keeps for the backward pass to host memory and a local disk.

Experimental: it has no figures of a GPU yet. It is promoted or removed by 2027-05-31.
"""

from tierfs.experimental.activations.offload import Activations

__all__ = ["Activations"]
