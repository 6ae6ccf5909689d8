"""Copies of a chunk on this host: the draft's slot, any slot, the nvme tier; the first sound one is read."""

import os
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest

from tierfs.clock import SystemClock
from tierfs.digest import DigestKind, digests_of, local_name
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.host.chunk_sources import ChunkSources, FileChunks, RamChunks
from tierfs.host.host import Host
from tierfs.host.pending.record import SlotRef
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.table import SlotKind

KIND = DigestKind.XXH3_128
MIB = 1 << 20
RAW = os.urandom(MIB + 5)
BLOCKS, DIGEST = digests_of(KIND, RAW)
ROW = Row(ChunkName(DIGEST), len(RAW), 0)


@pytest.fixture
def ram(tmp_path):
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    tier = RamTier(Host(tmp_path / "state", shm), uuid.uuid4().hex, budget_bytes=64 * MIB, clock=SystemClock())
    yield tier
    tier.close()


def put(ram, raw):
    slot = ram.take(SlotKind.CHUNK, len(raw), timeout_s=0)
    slot.segment.view(slot)[:] = raw
    return slot.segment.seal(slot, local_name(KIND, DIGEST), b"", stamp_ns=1)


def nvme(raw):
    def read(name, start, out):
        assert name == local_name(KIND, DIGEST)
        out[:] = raw[start : start + len(out)]
        return b"metadata" if raw else None

    return SimpleNamespace(read=read)


def sources_of(ram, first, counters=None, files=None):
    """Return the copies of chunks as a flusher sees them."""
    counters = Counter() if counters is None else counters
    tiers = [RamChunks(ram, counters, "bad", first, is_mapped=False)]
    tiers += [] if files is None else [FileChunks(files, lambda *_: None, counters, "bad")]
    return ChunkSources(KIND, tiers)


def other(at):
    """Return the bytes of the chunk with one that is wrong."""
    return RAW[:at] + bytes([RAW[at] ^ 1]) + RAW[at + 1 :]


@pytest.mark.parametrize("at", [5, MIB + 2], ids=["first block", "last block"])
@pytest.mark.parametrize(
    ("slots", "on_nvme", "bad"),
    [([RAW], None, 0), (["bad", RAW], None, 1), (["bad"], RAW, 1), ([], RAW, 0), (["bad"], "bad", 2), ([], None, 0)],
)
def test_the_first_sound_copy_is_read(ram, at, slots, on_nvme, bad):
    copies = [raw if raw != "bad" else other(at) for raw in (*slots, on_nvme)]
    put_slots = [put(ram, raw) for raw in copies[:-1]]
    first = {DIGEST: SlotRef.of(put_slots[0])} if put_slots else {}
    for slot in put_slots[:1]:
        slot.segment.hide(slot)  # so that only the draft leads to it
    counters = Counter()
    sources = sources_of(ram, first, counters, None if on_nvme is None else nvme(copies[-1]))
    out = memoryview(bytearray(len(RAW)))
    is_there = RAW in copies
    assert sources.read_whole(ROW, out) == (BLOCKS if is_there else None)
    assert not is_there or out == RAW
    assert counters["bad"] == bad


def test_a_part_is_read_unverified(ram):
    slot = put(ram, other(7))
    out = memoryview(bytearray(10))
    assert sources_of(ram, {DIGEST: SlotRef.of(slot)}).peek(ROW, 5, out)
    assert out == other(7)[5:15]


def test_a_reused_or_removed_slot_is_no_copy(ram):
    slot = put(ram, RAW)
    sources = sources_of(ram, {DIGEST: SlotRef.of(slot)})
    slot.segment.give(slot)
    assert sources.read_whole(ROW, memoryview(bytearray(len(RAW)))) is None
    assert not sources.peek(ROW, 0, memoryview(bytearray(5)))
