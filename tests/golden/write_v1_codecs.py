"""Add every codec, chunks with bases, and their damage to the golden files of format version 1.

Run once, on the files of `write_v1`: ``python tests/golden/write_v1_codecs.py``. Existing objects do not change.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import zstandard
from support.encoded import encoded_chunk
from write_v1 import HERE, SEED, resealed

from tierfs import digest
from tierfs.codec import Codec, Coding, Reason
from tierfs.digest import DigestKind
from tierfs.format import keys
from tierfs.format.envelope import BaseRange, Block, Envelope
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row, content_digest, decode_record
from tierfs.store.encode.pipeline import BlockPlan, EncodedBlock, blocks_of

ROOT = HERE / "store"
NOW_NS = 1_700_000_100_000_000_000
KIND = DigestKind.XXH3_128
MIB = 1 << 20
WIDTHS = (1, 2, 4, 8)
# float32: ties to even, down and up; just over a tie; the greatest number, which becomes infinite; infinities; -0; two
# denormals; three NaNs. One NaN has only low bits set, so plain rounding would make it infinite.
SPECIAL = (0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x80018000,
           0x7F800001, 0xFFFFFFFF, 0x7FC00000)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A range of the only chunk of another golden file."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True)
class Coded:
    """A golden file of one chunk. Its blocks are encoded in a given way, against ranges of other files' chunks."""

    raw: bytes
    codings: Sequence[Coding]
    parts: Sequence[Part] = ()


def coded_files() -> dict[str, Coded]:
    """Return files of every codec and width. Each comes after the files that it is encoded against."""
    draw = random.Random(SEED + 1)
    files: dict[str, Coded] = {
        "codecs/zstd.txt": Coded(b"a line of text\n" * 100, [Coding(Codec.ZSTD)]),
    }
    for w in WIDTHS:
        # The upper bytes of the elements are alike, the lower ones are not, and a tail follows the last element.
        low, count = 8 * max(w // 2, 1) - 4, 600
        elements = [((k % 3) << 8 * w - 2) + draw.getrandbits(low) & (1 << 8 * w) - 1 for k in range(count)]
        near = [(value + draw.randrange(-3, 4)) % (1 << 8 * w) for value in elements]
        changed = {*draw.sample(range(200), 7), count - 1}  # the last gap is over 255
        few = [value ^ 5 if k in changed else value for k, value in enumerate(elements)]
        tail = b"the end"[: w - 1]
        files[f"codecs/const-{w}.bin"] = Coded((bytes(range(7, 7 + w)) * 9)[: 9 * w - w // 2], [Coding(Codec.CONST)])
        path = f"codecs/plane-{w}.bin"
        whole = (Part(path, 0, count * w + len(tail)),)
        files[path] = Coded(packed(elements, w) + tail, [Coding(Codec.PLANE, w)])
        files[f"codecs/dplane-{w}.bin"] = Coded(packed(near, w) + tail.upper(), [Coding(Codec.DPLANE, w)], whole)
        files[f"codecs/sparse-{w}.bin"] = Coded(packed(few, w) + tail.upper(), [Coding(Codec.SPARSE, w)], whole)
        if w == 4:
            narrow = b"".join(packed([bfloat16(value)], 2) for value in elements) + b"!"
            parts = (Part(path, 0, 4 * count), Part("codecs/const-2.bin", 3, 2))
            files["codecs/derived.bin"] = Coded(narrow, [Coding(Codec.DERIVE, 2)], parts)
            # Nine elements among them do not follow from the base; any bytes of the base stand in for theirs.
            parts = (Part(path, 0, 1200), Part(path, 0, 36), Part(path, 1200, 1200), Part("codecs/const-2.bin", 3, 2))
            mixed = narrow[:600] + b"something of 18 by" + narrow[600:]
            files["codecs/derived-mostly.bin"] = Coded(mixed, [Coding(Codec.DERIVE, 2)], parts)
    files["codecs/sparse-none.bin"] = Coded(
        files["codecs/plane-2.bin"].raw[:-1] + b"T", [Coding(Codec.SPARSE, 2)], files["codecs/sparse-2.bin"].parts
    )
    # A state of three blocks, whose keyframe lies in two chunks that end elsewhere. Its bfloat16 copy covers the state
    # without its first two elements, and other elements behind it.
    count = (2 * MIB + 80) // 4
    state = array.array("I", [0x3F000000]) * count
    for at in (*range(MIB // 4, MIB // 4 + 500), *range(MIB // 2, count)):
        state[at] = 0x3F000000 + draw.getrandbits(20)
    state[MIB // 4 + 500 : MIB // 4 + 500 + len(SPECIAL)] = array.array("I", SPECIAL)
    cut = MIB + 4002
    keyframe = packed(state, 4)
    files["step-1/state-1.bin"] = Coded(keyframe[:cut], [Coding(Codec.CONST), Coding(Codec.PLANE, 4)])
    files["step-1/state-2.bin"] = Coded(keyframe[cut:], [Coding(Codec.PLANE, 4)])
    for at in range(0, MIB // 4, 1000):
        state[at] += 1 + at // 1000
    for at in range(MIB // 4 + 100, MIB // 2, 30_000):
        state[at] -= 7
    for at in range(MIB // 2, count):
        state[at] += draw.randrange(-9, 10)
    files["step-2/state.bin"] = Coded(
        packed(state, 4),
        [Coding(Codec.DPLANE, 4), Coding(Codec.SPARSE, 4), Coding(Codec.DPLANE, 4)],
        (Part("step-1/state-1.bin", 0, cut), Part("step-1/state-2.bin", 0, len(keyframe) - cut)),
    )
    other = files["codecs/plane-4.bin"].raw[4:804]
    wide = array.array("I", packed(state, 4)[8:] + other)
    files["step-2/working.bin"] = Coded(
        b"".join(bfloat16(number).to_bytes(2, "little") for number in wide),
        [Coding(Codec.DERIVE, 2)] * 2,
        (Part("step-2/state.bin", 8, 4 * count - 8), Part("codecs/plane-4.bin", 4, 800)),
    )
    return files


def packed(elements: Iterable[int], width: int) -> bytes:
    """Return little-endian elements."""
    return b"".join(value.to_bytes(width, "little") for value in elements)


def bfloat16(number: int) -> int:
    """Return the upper 16 bits of a float32, rounded as FORMAT.md says."""
    if number % (1 << 31) > 0x7F800000:
        return 0x7FFF
    return number + 0x7FFF + (number >> 16) % 2 >> 16


def write_coded(files: dict[str, Coded]) -> None:
    """Write the files, each after the files that it is encoded against."""
    rows: dict[str, Row] = {}
    for path, file in files.items():
        raw = memoryview(file.raw)
        sources = [rows[part.path] for part in file.parts]
        bases = tuple(base_of(row, part.offset, part.length) for row, part in zip(sources, file.parts, strict=True))
        needs = tuple(dict.fromkeys(name for row in sources for name in (row.name, *row.bases)))
        reference = b"".join(files[part.path].raw[part.offset : part.offset + part.length] for part in file.parts)
        reasons = {Codec.DPLANE: Reason.DELTA, Codec.SPARSE: Reason.DELTA, Codec.DERIVE: Reason.DERIVED}
        against = blocks_of(memoryview(reference), len(reference) // len(raw)) if bases else itertools.repeat(None)
        plans = [
            BlockPlan(coding, reasons.get(coding.codec, Reason.NOT_STATED), base)
            for coding, base in zip(file.codings, against, strict=False)
        ]
        blocks = encoded_chunk(raw, plans)
        assert [block.codec for block in blocks] == [coding.codec for coding in file.codings], path
        rows[path] = write_chunk(path, raw, blocks, bases, needs)


def write_chunk(
    path: str,
    raw: memoryview,
    blocks: Sequence[EncodedBlock],
    bases: tuple[BaseRange, ...] = (),
    needs: tuple[ChunkName, ...] = (),
) -> Row:
    """Write a file of one chunk whose blocks are already encoded."""
    digests = [digest.hash_bytes(KIND, block) for block in blocks_of(raw)]
    table = [Block(d, int(b.codec), len(b.data), b.reason) for d, b in zip(digests, blocks, strict=True)]
    envelope = Envelope(KIND, digest.combine(KIND, len(raw), digests), len(raw), tuple(table), bases)
    name = ChunkName(envelope.digest, 0, envelope.recipe)
    row = Row(name, len(raw), envelope.stored_length, needs)
    put(keys.chunk_key(name), envelope.encode() + b"".join(bytes(block.data) for block in blocks))
    put(keys.record_key(path), record_of(path, row))
    return row


def put(key: str, data: bytes) -> None:
    (ROOT / key).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / key).write_bytes(data)


def base_of(row: Row, offset: int, length: int) -> BaseRange:
    """Return the row of a base table for a range of a chunk."""
    return BaseRange(row.name, row.raw_length, row.stored_length, offset, length)


def record_of(path: str, row: Row) -> bytes:
    """Return the record of a file of one chunk, however small: a writer would keep small content in the record."""
    manifest = Manifest(
        kind=Kind.FILE,
        write_id=digest.checksum(path.encode()),
        length=row.raw_length,
        created_ns=NOW_NS,
        modified_ns=NOW_NS,
        digest_kind=KIND,
        digest=content_digest(KIND, row.raw_length, [row.name.digest]),
        rows=(row,),
    )
    return manifest.encode(path)


def row_of(path: str) -> Row:
    """Return the row of a golden file's only chunk."""
    manifest = decode_record((ROOT / keys.record_key(path)).read_bytes(), path, path)
    assert isinstance(manifest, Manifest)
    (row,) = manifest.rows
    return row


def write_damage(damaged: Iterable[Case]) -> None:
    """For each broken rule, write a chunk, the record of a file that needs the chunk, and the error of a read."""
    target = HERE / "damaged"
    cases = json.loads((target / "cases.json").read_text())
    for name, error, data, row, others in damaged:
        number = len(cases) + 1
        case = {"file": f"{number}-{name}.bin", "key": keys.chunk_key(row.name), "path": DAMAGED, "error": error}
        (target / case["file"]).write_bytes(data)
        case["others"] = {}
        for key, content in {**others, keys.record_key(DAMAGED): record_of(DAMAGED, row)}.items():
            file = f"{number}-{name}-{'record' if key.endswith('!') else 'base'}.bin"
            (target / file).write_bytes(content)
            case["others"][key] = file
        cases.append(case)
    (target / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


DAMAGED = "damaged.bin"
# The generation of damaged chunks. The valid chunk of the same content lies beside them.
GENERATION = 9
Case = tuple[str, str, bytes, Row, dict[str, bytes]]


def sound(path: str) -> tuple[Row, Envelope, bytes]:
    """Return row, envelope and encoded bytes of the only chunk of a golden file."""
    row = row_of(path)
    data = (ROOT / keys.chunk_key(row.name)).read_bytes()
    envelope = Envelope.decode(data, path, stored_length=len(data))
    return row, envelope, data[envelope.header_length :]


def chunk(row: Row, envelope: Envelope, encoded: bytes, generation: int = GENERATION) -> tuple[bytes, Row]:
    """Return the object and the row of a changed chunk."""
    name = ChunkName(envelope.digest, generation, envelope.recipe)
    data = envelope.encode() + encoded
    return data, replace(row, name=name, stored_length=len(data))


def encoded(name: str, path: str, change: Callable[[bytes], bytes]) -> Case:
    """Return the case of a file whose only block is damaged."""
    row, envelope, before = sound(path)
    after = change(before)
    (block,) = envelope.blocks
    block = replace(block, encoded_length=len(after))
    return (name, "corruption", *chunk(row, replace(envelope, blocks=(block,)), after), {})


def bytes_at(offset: int, new: bytes) -> Callable[[bytes], bytes]:
    """Return a function that replaces bytes."""
    return lambda data: data[:offset] + new + data[offset + len(new) :]


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def damaged_chunks() -> Iterator[Case]:
    """Yield chunks that break one rule each: name of the case, error, object, its row, and other objects to put."""

    def bases(name: str, error: str, path: str, change: Callable[[BaseRange], BaseRange | Sequence[BaseRange]]) -> Case:
        row, envelope, data = sound(path)
        changed = change(envelope.bases[0])
        table = (changed,) if isinstance(changed, BaseRange) else tuple(changed)
        needs = tuple(dict.fromkeys(base.name for base in table))[:64]
        return (name, error, *chunk(replace(row, bases=needs), replace(envelope, bases=table), data), {})

    def block(name: str, path: str, codec: Codec) -> Case:
        row, envelope, data = sound(path)
        blocks = (replace(envelope.blocks[0], codec=int(codec)),)
        return (name, "format", *chunk(row, replace(envelope, blocks=blocks), data), {})

    def patched(name: str, path: str, offset: int, new: bytes) -> Case:
        row, envelope, data = sound(path)
        head = bytearray(envelope.encode())
        head[offset : offset + len(new)] = new
        recipe = bytes(head[32:40])
        row = replace(row, name=ChunkName(envelope.digest, GENERATION, recipe))
        return name, "format", resealed(bytes(head)) + data, row, {}

    plane, sparse, const, derived = (f"codecs/{name}.bin" for name in ("plane-4", "sparse-4", "const-4", "derived"))
    yield encoded("const-of-3-bytes", const, lambda data: data[:3])
    yield encoded("zstd-bytes-behind-the-frame", "codecs/zstd.txt", lambda data: data + b"x")
    yield encoded("zstd-two-frames", "codecs/zstd.txt", lambda data: data + b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00")
    yield encoded("zstd-a-skippable-frame-first", "codecs/zstd.txt", lambda data: b"\x50\x2a\x4d\x18" + u32(0) + data)
    text = b"a line of text\n" * 100
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(text)
    yield encoded("zstd-no-content-size", "codecs/zstd.txt", lambda _: unsized)
    assert (unsized[4] >> 6, sound("codecs/zstd.txt")[2][4] & 3) == (
        0,
        0,
    )  # no size in one header, no dictionary in the other
    yield encoded(
        "zstd-of-a-dictionary", "codecs/zstd.txt", lambda data: data[:4] + bytes([data[4] | 1]) + b"\x07" + data[5:]
    )
    yield encoded("zstd-cut-short", "codecs/zstd.txt", lambda data: data[:-1])
    yield encoded("plane-cut-in-its-heads", plane, lambda data: data[:15])
    yield encoded("plane-width-3", plane, bytes_at(0, b"\x03"))
    yield encoded("plane-order-3", plane, bytes_at(1, b"\x03"))
    yield encoded("plane-mode-3", plane, bytes_at(2, b"\x03"))
    yield encoded("plane-raw-of-another-length", plane, lambda data: bytes_at(18, u32(599))(data)[:-1])
    yield encoded("plane-constant-of-2-bytes", plane, lambda data: data[:8] + u32(2) + data[12:43] + b"x" + data[43:])
    yield encoded("plane-a-byte-more", plane, lambda data: data + b"x")
    yield encoded("plane-a-byte-less", plane, lambda data: data[:-1])
    yield encoded("plane-wrong-digest", plane, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    yield encoded("plane-frame-of-another-size", plane, frame_of(599))
    yield encoded("plane-frame-not-shorter", plane, frame_of(600, padding=True))
    yield encoded("dplane-order-1", "codecs/dplane-4.bin", bytes_at(1, b"\x01"))
    yield encoded("dplane-width-5", "codecs/dplane-4.bin", bytes_at(0, b"\x05"))
    yield encoded("sparse-width-0", sparse, bytes_at(0, b"\x00"))
    yield encoded("sparse-reserved", sparse, bytes_at(1, b"\x01"))
    yield encoded("sparse-more-than-all-differ", sparse, bytes_at(2, u32(601)))
    yield encoded("sparse-too-many-gap-bytes", sparse, bytes_at(6, u32(8 + 3)))
    yield encoded("sparse-cut-in-its-heads", sparse, lambda data: data[:20])
    for name, gaps in (
        ("sparse-ends-with-a-skip", b"\0" * 8 + b"\xff"),
        ("sparse-too-few-gaps", b"\xff\xff" + b"\0" * 7),
        ("sparse-too-many-gaps", b"\0" * 9),
        ("sparse-beyond-the-end", b"\xff" + b"\xfe" * 8),
    ):
        yield encoded(name, sparse, with_gaps(gaps))
    yield encoded(
        "sparse-a-constant-of-nothing",
        "codecs/sparse-none.bin",
        lambda data: data[:10] + b"\x01" + u32(1) + data[15:25] + b"\0" + data[25:],
    )
    yield encoded("derive-function-2", derived, bytes_at(0, b"\x02"))
    yield encoded("derive-without-its-tail", derived, lambda data: data[:-1])
    yield encoded("derive-cut-in-its-heads", derived, lambda data: data[:8])
    mostly = "codecs/derived-mostly.bin"
    yield encoded("derive-more-than-all-do-not-follow", mostly, bytes_at(1, u32(610)))
    yield encoded("derive-too-many-gap-bytes", mostly, bytes_at(5, u32(9 + 3)))
    yield encoded("derive-too-few-values", mostly, bytes_at(1, u32(8)))
    yield encoded("derive-a-byte-more", derived, lambda data: data + b"x")
    yield block("dplane-without-bases", plane, Codec.DPLANE)
    yield block("derive-in-a-delta", sparse, Codec.DERIVE)
    yield block("sparse-in-a-derived-chunk", derived, Codec.SPARSE)
    table = 40 + 16  # offset of the block table
    yield patched("block-reserved", plane, table + 18, b"\x01")
    yield patched("block-of-no-bytes", plane, table + 20, u32(0))
    yield patched("block-as-long-as-raw", plane, table + 20, u32(2403))
    yield patched("block-stored-but-shorter", plane, table + 16, b"\x00")
    yield patched("recipe-of-other-bases", sparse, 32, b"\x01" * 8)
    yield patched("recipe-zero-with-bases", sparse, 32, bytes(8))
    yield patched("recipe-without-bases", plane, 32, b"\x01" * 8)
    yield bases("base-range-beyond-its-end", "format", sparse, lambda base: replace(base, offset=1))
    yield bases("base-offset-huge", "format", sparse, lambda base: replace(base, offset=(1 << 32) - 1))
    yield bases("base-range-empty", "format", sparse, lambda base: (base, replace(base, length=0)))
    yield bases("base-raw-length-huge", "format", sparse, lambda base: replace(base, raw_length=(16 << 20) + 1))
    yield bases(
        "base-stored-length-huge", "format", sparse, lambda base: replace(base, stored_length=(16 << 20) + 65537)
    )
    yield bases("reference-too-short", "format", sparse, lambda base: replace(base, length=base.length - 1))
    yield bases("reference-too-long", "format", sparse, lambda base: (base, replace(base, length=1)))
    yield bases("reference-three-times-as-long", "format", sparse, lambda base: (base,) * 3)
    yield bases("bases-65", "format", sparse, lambda base: in_pieces(base, 65))
    yield bases("base-missing", "corruption", sparse, lambda base: replace(base, name=replace_generation(base.name, 5)))
    yield bases(
        "base-of-another-length", "corruption", sparse, lambda base: replace(base, raw_length=base.raw_length + 1)
    )
    yield bases(
        "base-of-another-size", "corruption", sparse, lambda base: replace(base, stored_length=base.stored_length + 1)
    )
    yield bases(
        "base-is-another-chunk",
        "corruption",
        sparse,
        lambda base: replace(base, name=row_of("codecs/plane-2.bin").name),
    )
    # A delta of a delta of a delta. The last two change nothing.
    row, envelope, _ = sound("codecs/dplane-4.bin")
    same = b"\x04\x00" + (b"\x01" + u32(1)) * 4 + bytes(4) + b"THE"
    chain: dict[str, bytes] = {}
    for generation in (8, GENERATION):
        base = base_of(row, 0, row.raw_length)
        envelope = replace(envelope, blocks=(replace(envelope.blocks[0], encoded_length=len(same)),), bases=(base,))
        data, row = chunk(replace(row, bases=(row.name, *row.bases)), envelope, same, generation)
        chain[keys.chunk_key(row.name)] = data
    deepest = chain.pop(keys.chunk_key(row.name))
    yield "chunks-too-deep", "format", deepest, row, chain


def replace_generation(name: ChunkName, generation: int) -> ChunkName:
    """Return the name of another chunk object of the same content."""
    return ChunkName(name.digest, generation, name.recipe)


def in_pieces(base: BaseRange, count: int) -> tuple[BaseRange, ...]:
    """Split a range into ``count`` rows."""
    pieces = [replace(base, offset=base.offset + at, length=1) for at in range(count - 1)]
    return (*pieces, replace(base, offset=base.offset + count - 1, length=base.length - count + 1))


def frame_of(size: int, *, padding: bool = False) -> Callable[[bytes], bytes]:
    """Make the first plane a frame of ``size`` zeros, or with ``padding`` one that is no shorter than the plane."""
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(size))
    if padding:
        frame = zstandard.ZstdCompressor(level=1).compress(random.Random(SEED).randbytes(size))
        assert len(frame) >= size

    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[3:7], "little")
        return data[:2] + b"\x02" + len(frame).to_bytes(4, "little") + data[7:22] + frame + data[22 + length :]

    return change


def with_gaps(gaps: bytes) -> Callable[[bytes], bytes]:
    """Give a SPARSE block of width 4 these gaps."""

    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[11:15], "little")
        head = data[:6] + len(gaps).to_bytes(4, "little") + b"\x00" + len(gaps).to_bytes(4, "little")
        return head + data[15:35] + gaps + data[35 + length :]

    return change


def main() -> None:
    write_coded(coded_files())
    write_damage(damaged_chunks())
    expect({path: file.raw for path, file in coded_files().items()})


def expect(files: dict[str, bytes]) -> None:
    """Record the digests of the files' contents."""
    expected = json.loads((HERE / "expected.json").read_text())
    expected["files"] |= {path: hashlib.sha256(raw).hexdigest() for path, raw in files.items()}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
