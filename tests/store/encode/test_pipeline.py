"""The blocks of a chunk, some of them encoded together."""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.encoded import encoded_chunk

from tierfs.buffers import Buffers, buffers
from tierfs.codec import Codec, Coding, Reason, decode_block
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES
from tierfs.store.encode import pipeline as encoding
from tierfs.store.encode.desks import Desks, desks
from tierfs.store.encode.pipeline import BlockPlan, blocks_of, encode_chunk, keep
from tierfs.store.encode.room import lend_room

P2, P4, P8 = (Coding(Codec.PLANE, width) for width in (2, 4, 8))
D4, NOTHING = Coding(Codec.DPLANE, 4), Coding(Codec.STORE)


def floats(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")


def test_blocks_whose_plans_agree_are_encoded_together_and_eight_bases_count(monkeypatch):
    codings = [P4, P4, P4, D4, P4, NOTHING, P4, P4, P2, P2, P4, P8, P8, P4, P4]
    state = floats((len(codings) * BLOCK_BYTES - 40_000) // 4, 1)
    state[BLOCK_BYTES // 4 : BLOCK_BYTES // 2] = 0.5
    raw, bases = memoryview(state).cast("B"), memoryview(state + np.float32(0.001)).cast("B")
    shared = [bytearray(BLOCK_BYTES) for _ in range(8)]
    seen: list[tuple[Codec, int]] = []
    encode_blocks = encoding.encode_blocks

    def plans():
        for number, (coding, base) in enumerate(zip(codings, blocks_of(bases), strict=True)):
            shared[number % 8][: len(base)] = base
            yield BlockPlan(coding, Reason(number % 3), memoryview(shared[number % 8])[: len(base)])

    def seeing(raws, coding, *others):
        seen.append((coding.codec, sum(map(len, raws))))
        return encode_blocks(raws, coding, *others)

    monkeypatch.setattr(encoding, "encode_blocks", seeing)
    blocks = encoded_chunk(raw, plans())
    short = BLOCK_BYTES - 40_000
    assert [count for _, count in seen] == [
        *[3 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES],
        *[2 * BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES, short],
    ]
    assert [block.codec for block in blocks[:6]] == [3, 2, 3, 4, 3, 0]
    assert [block.reason for block in blocks] == [number % 3 for number in range(len(codings))]
    for block, want, base in zip(blocks, blocks_of(raw), blocks_of(bases), strict=True):
        out = memoryview(bytearray(len(want)))
        decode_block(block.codec, memoryview(block.data), out, base, "here")
        assert out == want


def test_blocks_of_different_tensors_are_not_looked_at_together():
    squares = np.square(np.random.default_rng(3).uniform(0.002, 0.02, BLOCK_BYTES // 4)).astype("<f4")
    raw = memoryview(np.concatenate([squares, floats(BLOCK_BYTES // 4, 3)])).cast("B")
    alone = [len(encoded_chunk(block, [BlockPlan(P4, Reason.NO_BASE)])[0].data) for block in blocks_of(raw)]
    found = encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE, None, name) for name in ("v", "m")])
    assert [len(block.data) for block in found] == alone
    assert len(encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 2)[0].data) > alone[0] + 10_000


def test_blocks_that_hardly_shrink_have_room_each():
    rng = np.random.default_rng(4)
    count = 2 * BLOCK_BYTES // 4
    elements = rng.integers(0, 1 << 23, count) | rng.integers(0, 120, count) << 23 | rng.integers(0, 2, count) << 31
    raw = memoryview(elements.astype("<u4")).cast("B")
    for block, want in zip(encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 2), blocks_of(raw), strict=True):
        assert 0.96 < len(block.data) / BLOCK_BYTES < 0.97
        out = memoryview(bytearray(BLOCK_BYTES))
        decode_block(block.codec, memoryview(block.data), out, None, "here")
        assert out == want


def test_what_may_not_be_made_of_a_block_is_stored():
    raw = memoryview(floats(BLOCK_BYTES, 2)).cast("B")
    assert {block.codec for block in encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 4)} == {Codec.PLANE}
    stored = encoded_chunk(raw, [BlockPlan(P4, Reason.NO_BASE)] * 4, allowed={Codec.STORE, Codec.DPLANE})
    assert b"".join(block.data for block in stored) == raw
    assert {block.codec for block in stored} == {Codec.STORE}


@pytest.mark.parametrize("in_room", [True, False])
@pytest.mark.parametrize("encoded", [{0, 1, 3, 5}, {2}, {5}, {0, 1, 2, 3, 4, 5}, set()], ids=str)
def test_what_is_encoded_stays_in_its_room_when_the_desk_is_the_next_ones(encoded, in_room, monkeypatch):
    monkeypatch.setattr(desks, "shared", Desks())
    state = floats((6 * BLOCK_BYTES - 40_000) // 4, 7)
    with lend_room() as room:
        raw = room.memory[: state.nbytes] if in_room else memoryview(bytearray(state.nbytes))
        raw[:] = memoryview(state).cast("B")
        with desks().lend() as desk:
            plans = [BlockPlan(P4 if number in encoded else NOTHING, Reason.NO_BASE) for number in range(6)]
            blocks = keep(encode_chunk(raw, plans, desk), raw, desk, room)
            was_used = desk._memory is not None
        assert was_used is bool(encoded)
        with desks().lend() as desk:
            desk.take().out[:] = bytes(CHUNK_BYTES)
            assert desk.take().out.obj is not room.memory.obj
        assert [block.codec is Codec.PLANE for block in blocks] == [number in encoded for number in range(6)]
        for block, want in zip(blocks, blocks_of(memoryview(state).cast("B")), strict=True):
            out = memoryview(bytearray(len(want)))
            decode_block(block.codec, memoryview(block.data), out, None, "here")
            assert out == want
        if not in_room:
            assert raw == memoryview(state).cast("B")


def test_a_room_takes_no_memory_before_it_is_needed(monkeypatch):
    monkeypatch.setattr(buffers, "shared", Buffers())
    with lend_room():
        assert buffers()._taken == 0
    with lend_room() as room:
        assert len(room.memory) == CHUNK_BYTES
        assert buffers()._taken == 1
    assert buffers()._taken == 0


def on_a_thread(work, *args):
    """Where desks are counted."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result(60)


def test_where_there_is_no_memory_for_a_desk_nobody_waits_for_it_then(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(desks, "shared", Desks())

    def use():
        with desks().lend() as desk:
            return len(desk.take().out)

    with monkeypatch.context() as short:
        short.setattr("tierfs.store.encode.desks.fresh", cannot_map)
        for _ in range(3):
            with pytest.raises(OSError, match="no memory"):
                on_a_thread(use)
    assert [on_a_thread(use) for _ in range(3)] == [CHUNK_BYTES] * 3


def cannot_map(length):
    raise OSError("no memory")


def test_the_main_thread_waits_for_no_desk(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(desks, "shared", Desks())

    def hold():
        with desks().lend() as desk:
            desk.take()
            taken.set()
            assert done.wait(60)

    taken, done = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert taken.wait(60)
        with desks().lend() as desk:
            desk.take()
        done.set()
        holding.result(60)
    assert len(desks()._free) == 2


@pytest.mark.parametrize("call", range(1, 8))
def test_an_interrupted_exchange_leaves_no_memory_to_two(monkeypatch, call):
    monkeypatch.setattr(desks, "shared", Desks())
    monkeypatch.setattr(buffers, "shared", Buffers())
    calls = []

    def interrupt(frame, event, arg):
        if frame.f_code.co_filename.endswith(("desks.py", "room.py")) and sys._getframe(1).f_code is not leave.__code__:
            calls.append(event)
            if len(calls) == call:
                raise KeyboardInterrupt

    def leave(desk, room):
        sys.setprofile(interrupt)
        try:
            desk.exchange(room)
        finally:
            sys.setprofile(None)

    with contextlib.suppress(KeyboardInterrupt), lend_room() as room, desks().lend() as desk:
        desk.take()
        leave(desk, room)
    given = [memory.out.obj for memory in desks()._free] + [memory.obj for memory in buffers()._free]
    assert len({id(memory) for memory in given}) == len(given)
    assert calls
