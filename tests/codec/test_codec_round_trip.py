"""Encoded blocks decode to the same bytes, whatever their content and alignment."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.coded import CONTENTS, RELATIONS, WIDTHS, base_of, block, decode, encode, shifted
from support.waiting import HANG_S

from tierfs.codec import Codec, Coding, decode_block, encode_block
from tierfs.digest import BLOCK_BYTES

random_tests = settings(max_examples=300, derandomize=True, deadline=None, database=None)
sizes = st.one_of(st.integers(1, 100), st.integers(1, 70_000), st.integers(250_000, 260_000))
offsets = st.integers(0, 7)
seeds = st.integers(0, 1 << 20)


def reference(raw: bytes, codec: Codec, relation: str, width: int, seed: int) -> bytes | None:
    """Return a base of the kind and length that the codec needs, or None."""
    if codec in {Codec.DPLANE, Codec.SPARSE}:
        return base_of(raw, relation, width, seed)
    if codec is Codec.DERIVE:
        # float32 numbers with these upper halves and lower halves that round down: all but NaNs follow from them.
        floats = np.frombuffer(raw, "<u2", len(raw) // 2).astype("<u4") << 16
        noise = np.random.default_rng(seed).integers(0, 0x8000, floats.size, dtype=np.uint32)
        return (floats | noise).tobytes() + bytes(2 * (len(raw) % 2))
    return None


@random_tests
@given(
    st.sampled_from(Codec), st.sampled_from(WIDTHS), st.sampled_from(CONTENTS), st.sampled_from(RELATIONS), sizes,
    seeds, st.tuples(offsets, offsets, offsets, offsets, offsets), st.booleans(),
)  # fmt: skip
def test_every_block_comes_back(
    asked: Codec,
    width: int,
    content: str,
    relation: str,
    size: int,
    seed: int,
    places: tuple[int, int, int, int, int],
    read_only: bool,
) -> None:
    raw = block(content, size, width, seed)
    needed = reference(raw, asked, relation, width, seed)
    source = shifted(raw, places[0], read_only=read_only)
    base = None if needed is None else shifted(needed, places[1], read_only=read_only)
    buffer = shifted(bytes(size), places[2], read_only=False)
    codec, length = encode_block(source, Coding(asked, width), base, buffer)
    assert source == raw
    assert base is None or base == needed
    assert (length == size) == (codec is Codec.STORE)
    encoded = shifted(raw if codec is Codec.STORE else bytes(buffer[:length]), places[3], read_only=read_only)
    for before in (0x55, 0xAA):  # A byte that is not written shows for one of the two values.
        guarded = shifted(bytes([before]) * (size + 2), places[4], read_only=False)
        decode_block(int(codec), encoded, guarded[1:-1], base, "here")
        assert guarded[1:-1] == raw
        assert (guarded[0], guarded[-1]) == (before, before)


@random_tests
@given(st.binary(min_size=1, max_size=300), st.binary(min_size=300, max_size=300), st.sampled_from(WIDTHS))
def test_short_blocks_of_any_bytes_come_back(raw: bytes, other: bytes, width: int) -> None:
    for asked in Codec:
        base = (other * 2)[: len(raw) * asked.base_factor] or None
        codec, encoded = encode(raw, Coding(asked, width), base)
        assert decode(codec, encoded, len(raw), base) == raw


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("asked", list(Codec))
def test_whole_blocks_come_back(asked: Codec, width: int) -> None:
    for content in CONTENTS:
        raw = block(content, BLOCK_BYTES, width, 3)
        base = reference(raw, asked, "few", width, 4)
        codec, encoded = encode(raw, Coding(asked, width), base)
        assert decode(codec, encoded, BLOCK_BYTES, base) == raw


def test_threads_do_not_share_what_they_work_in() -> None:
    jobs = [
        (block(content, 200_000 + 7 * seed, width, seed), Coding(asked, width))
        for seed, content in enumerate(CONTENTS)
        for width in (2, 4)
        for asked in (Codec.PLANE, Codec.DPLANE, Codec.SPARSE)
    ]
    bases = [base_of(raw, "few", coding.width, 9) for raw, coding in jobs]
    alone = [encode(raw, coding, base) for (raw, coding), base in zip(jobs, bases, strict=True)]
    wrong: list[object] = []
    start = threading.Barrier(3)

    def work(first: int) -> None:
        start.wait(HANG_S)
        for index in [*range(first, len(jobs)), *range(first)]:
            raw, coding = jobs[index]
            result = encode(raw, coding, bases[index])
            if result != alone[index] or decode(*result, len(raw), bases[index]) != raw:
                wrong.append((coding, len(raw)))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 7, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
