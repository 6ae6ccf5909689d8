"""Add the modes of planes that `write_v1_codecs` lacks, and their damage, to the golden files of format version 1.

Run once, on the files of that script: ``python tests/golden/write_v1_planes.py``. Existing objects do not change.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import zstandard
from write_v1 import SEED
from write_v1_codecs import Case, Coded, Part, bytes_at, encoded, expect, u32, write_chunk, write_coded, write_damage

from tierfs.codec import Codec, Coding, Reason
from tierfs.store.encode.pipeline import EncodedBlock

# A few elements more than the encoder needs to sample a plane, and an odd number of them.
COUNT = (16 << 10) + 77


def written() -> dict[str, Coded]:
    """Return floats as the writer packs them: exponents, mantissas and, in squares, unset signs; and later values."""
    draw = random.Random(SEED + 2)
    floats = [draw.gauss(0, 0.02) for _ in range(COUNT)]
    files = {
        "codecs/floats-2.bin": struct.pack(f"<{COUNT}e", *floats) + b"!",
        "codecs/floats-4.bin": struct.pack(f"<{COUNT}f", *floats) + b"end",
        "codecs/squares-4.bin": struct.pack(f"<{COUNT}f", *(number * number for number in floats)),
    }
    found = {path: Coded(raw, [Coding(Codec.PLANE, int(path[-5]))]) for path, raw in files.items()}
    later = struct.pack(f"<{COUNT}f", *(number + draw.gauss(0, 0.0002) for number in floats)) + b"END"
    parts = (Part("codecs/floats-4.bin", 0, len(later)),)
    return found | {"codecs/later-4.bin": Coded(later, [Coding(Codec.DPLANE, 4)], parts)}


def by_hand() -> dict[str, tuple[bytes, bytes]]:
    """Return short blocks, each with an encoding that a more thorough writer might choose."""

    def head(mode: int, length: int) -> bytes:
        return struct.pack("<BI", mode, length)

    window = [(250 + index % 16) % 256 for index in range(601)]
    codes = [index % 16 for index in range(601)]
    for at, byte in ((3, 0x77), (600, 0x0A)):
        window[at], codes[at] = byte, 0
    pairs = bytes(low | high << 4 for low, high in zip(codes[::2], [*codes[1::2], 0], strict=True))
    frame = zstandard.ZstdCompressor(level=1).compress(pairs)
    data = struct.pack("<BI2I", 250, 2, 3, 600) + b"\x77\x0a" + frame
    sevens = bytes(index % 128 for index in range(640))
    packed = bytearray(sevens[:560])
    for k in range(7):
        for j in range(80):
            packed[k * 80 + j] |= (sevens[560 + j] >> k & 1) << 7
    mostly = bytearray(b"\x07" * 601)
    mostly[5], mostly[600] = 0x77, 0x0A
    others = struct.pack("<BII4B", 7, 2, 4, 5, 255, 255, 84) + b"\x77\x0a"
    low = bytes(range(1, 201))
    woven = b"".join(struct.pack("<Q", 0x3FF0_0000_0000_0000 | number << 32 | number) for number in low)
    lanes = struct.pack("<200H", *low)
    return {
        "codecs/codes-1.bin": (bytes(window), b"\x01\x00" + head(3, len(data)) + data),
        "codecs/seven-1.bin": (sevens + b"some", b"\x01\x00" + head(4, 564) + bytes(packed) + b"some"),
        "codecs/mostly-1.bin": (bytes(mostly), b"\x01\x00" + head(6, len(others)) + others),
        "codecs/woven-8.bin": (
            woven,
            b"\x08\x01"
            + head(1, 1) * 2
            + (head(5, 400) + head(5, 0) + head(1, 1) * 2)
            + (head(5, 400) + head(5, 0))
            + b"\x7f\x70"
            + lanes
            + b"\0\0"
            + lanes,
        ),
    }


def damaged_planes() -> Iterator[Case]:
    """Yield chunks that break one rule each."""
    codes, seven, woven, mostly = (f"codecs/{name}.bin" for name in ("codes-1", "seven-1", "woven-8", "mostly-1"))
    yield encoded("plane-order-9", woven, bytes_at(1, b"\x09"))
    yield encoded("plane-order-1-of-bytes", codes, bytes_at(1, b"\x01"))
    yield encoded("plane-order-of-differences", woven, bytes_at(1, b"\x02"))
    yield encoded("dplane-order-of-floats", "codecs/later-4.bin", bytes_at(1, b"\x01"))
    yield encoded("plane-mode-7", seven, bytes_at(2, b"\x07"))
    yield encoded("codes-one-more-outside", codes, bytes_at(8, u32(3)))
    yield encoded("codes-one-less-outside", codes, bytes_at(8, u32(1)))
    yield encoded("codes-more-outside-than-bytes", codes, bytes_at(8, u32(601)))
    yield encoded("codes-outside-beyond-the-plane", codes, bytes_at(16, u32(601)))
    yield encoded("codes-without-a-frame", codes, lambda data: data[:3] + u32(15) + data[7:22])
    yield encoded("codes-cut-in-their-head", codes, lambda data: data[:3] + u32(4) + data[7:11])
    yield encoded("codes-of-a-frame-of-another-size", codes, lambda data: reframed(data, bytes(300)))
    yield encoded("seven-one-byte-more", seven, lambda data: data[:3] + u32(565) + data[7:] + b"x")
    yield encoded("seven-wrong-digest", seven, lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:])
    yield encoded("woven-without-its-second-head", woven, bytes_at(17, b"\x00"))
    yield encoded("woven-with-a-second-length", woven, lambda data: bytes_at(13, u32(399))(bytes_at(18, u32(1))(data)))
    between = b"\x05" + u32(400) + b"\x05" + u32(0) + b"\x01" + u32(1)
    yield encoded("woven-from-the-second-plane", woven, bytes_at(7, between))
    upper = b"\x05" + u32(400) + b"\x05" + u32(0) + (b"\x01" + u32(1)) * 2
    yield encoded("woven-and-in-another-order", woven, lambda data: upper.join((data[:2], data[22:42] + bytes(804))))
    yield encoded("mostly-one-more", mostly, bytes_at(8, u32(3)))
    yield encoded("mostly-more-than-bytes", mostly, bytes_at(8, u32(602)))
    yield encoded("mostly-one-gap-less", mostly, bytes_at(12, u32(3)))
    yield encoded("mostly-beyond-the-plane", mostly, bytes_at(19, b"\x55"))
    yield encoded("mostly-ends-with-a-skip", mostly, bytes_at(19, b"\xff"))
    yield encoded("mostly-cut-in-its-head", mostly, lambda data: data[:3] + u32(8) + data[7:15])


def reframed(data: bytes, pairs: bytes) -> bytes:
    """Replace the frame of the codes."""
    frame = zstandard.ZstdCompressor(level=1).compress(pairs)
    return data[:3] + u32(15 + len(frame)) + data[7:22] + frame


def main() -> None:
    files, short = written(), by_hand()
    write_coded(files)
    for path, (raw, data) in short.items():
        write_chunk(path, memoryview(raw), [EncodedBlock(Codec.PLANE, Reason.NOT_STATED, data)])
    write_damage(damaged_planes())
    expect({path: file.raw for path, file in files.items()} | {path: raw for path, (raw, _) in short.items()})


if __name__ == "__main__":
    main()
