"""Pure functions that encode and decode blocks, and that find the tensors of a file."""

from tierfs.codec.blocks import Codec, Coding, Reason, decode_block, encode_block, encode_blocks
from tierfs.codec.layout.elements import Span, spans

__all__ = ["Codec", "Coding", "Reason", "Span", "decode_block", "encode_block", "encode_blocks", "spans"]
