"""Pure functions between raw and encoded bytes."""

from tierfs.codec.blocks import Codec, decode_block, encode_block

__all__ = ["Codec", "decode_block", "encode_block"]
