"""Read encoded chunks with bases: any range, from any tier, by many threads at once."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.encoded import encoded_chunk, put_encoded
from support.saving import Flushing, Training, condemn, remove
from support.tiered import MIB, Host
from support.waiting import HANG_S

from tierfs.buffers import Buffers
from tierfs.codec import Codec, Coding, Reason, decode_block
from tierfs.errors import CorruptionError, FormatError
from tierfs.format import keys
from tierfs.format.envelope import BaseRange
from tierfs.host.pending.levels import Level
from tierfs.objects import LocalObjects, MeasuredObjects
from tierfs.store import Store, WriteMode, Writer, copy, delete, load, open_entry, rename, save, stat, verify, wait
from tierfs.store.chunks import store_chunk
from tierfs.store.encode.pipeline import BlockPlan, Encoded, blocks_of
from tierfs.store.read.fetch import fetch
from tierfs.store.read.lookup import find_chunk, inspect
from tierfs.store.tree.records import observe
from tierfs.testing import Fault, FaultyObjects
from tierfs.threads import Processors

PATHS = ("run/step_1/shard", "run/step_2/shard")


@pytest.fixture
def flushing(objects):
    return Flushing(objects)


@pytest.fixture
def saved(flushing):
    """A keyframe, and a save with deltas and chunks derived from them."""
    training = Training(3 * MIB // 4 + 1)
    contents = dict(zip(PATHS, (training.pair(), training.step().pair()), strict=True))
    for path, data in contents.items():
        flushing.save(path, data)
    codecs = flushing.codecs_of(rows_of(flushing.store, PATHS[1]))
    assert codecs["DPLANE"]
    assert codecs["DERIVE"]
    return contents


def rows_of(store, path):
    return observe(store, path).manifest.rows


def store_against(store, raw, row, reference, codec=Codec.DPLANE):
    """Store a chunk as the difference to a given one, whatever its content."""
    bases = blocks_of(memoryview(reference), len(reference) // len(raw))
    blocks = encoded_chunk(memoryview(raw), [BlockPlan(Coding(codec, 4), Reason.DELTA, base) for base in bases])
    base = BaseRange(row.name, row.raw_length, row.stored_length, 0, len(reference))
    return put_encoded(store, raw, Encoded(blocks, (base,), (row.name, *row.bases)))


def data_like(data):
    changed = bytearray(data)
    changed[::4001] = bytes(len(changed[::4001]))
    return bytes(changed)


def deadline(action, seconds=20):
    """Return an action's result, or fail if the action hangs."""
    found = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it does not come to an end"
    return found[0]


# -- ranges ------------------------------------------------------------------------------------------------------------


def ranges(length, seed):
    yield from [(0, 1), (length - 1, length), (0, length), (MIB - 1, MIB + 1), (length // 2 - 3, length // 2 + 5)]
    rng = random.Random(seed)
    for _ in range(40):
        start = rng.randrange(length)
        yield start, rng.randint(start + 1, min(length, start + rng.choice([10, MIB, 4 * MIB])))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tiers", ["none", "both", "too small"])
def test_any_range_of_what_is_encoded_against_others_can_be_read(saved, objects, flushing, tmp_path, tiers, exact):
    host = None
    if tiers == "none":
        store = flushing.bare()
    else:
        ram = 128 * MIB if tiers == "both" else MIB
        host = Host(tmp_path, objects, flushing.descriptor, ram=ram, nvme=0)
        store = host.store
    try:
        for path, data in saved.items():
            reader = open_entry(store, stat(store, path), exact=exact)

            def check(some, reader=reader, data=data):
                out = bytearray(some[1] - some[0])
                reader.read_into(some[0], memoryview(out))
                assert out == data[some[0] : some[1]]

            with ThreadPoolExecutor(6) as pool:
                list(pool.map(check, ranges(len(data), 1)))
    finally:
        if host is not None:
            host.close()


def with_deltas(objects):
    """Save 16 MiB, and then a save against it. Return the flusher and the second save's content."""
    flushing = Flushing(objects)
    training = Training(4 * MIB)
    flushing.save(PATHS[0], training.file())
    data = training.step().file()
    flushing.save(PATHS[1], data)
    return flushing, data


def test_a_part_of_a_delta_takes_a_part_of_its_base(objects):
    flushing, data = with_deltas(objects)
    measured = MeasuredObjects(objects)
    store = Store(measured, flushing.descriptor, url="store")
    out = bytearray(1000)
    open_entry(store, stat(store, PATHS[1]), exact=True).read_into(5 * MIB, memoryview(out))
    assert out == data[5 * MIB : 5 * MIB + 1000]
    assert measured.snapshot()["get"]["bytes"] < 4 * MIB


def test_a_chunk_and_its_base_are_fetched_once_for_all_that_is_wanted(objects):
    flushing, data = with_deltas(objects)
    deltas = [row for row in rows_of(flushing.store, PATHS[1]) if row.bases]
    assert deltas
    measured = MeasuredObjects(objects)
    store = Store(measured, flushing.descriptor, url="store")
    parts = [(at, memoryview(bytearray(min(MIB + 3, len(data) - at)))) for at in range(0, len(data), MIB + 3)]
    reader = open_entry(store, stat(store, PATHS[1]), exact=True)
    before = measured.snapshot()["get"]["requests"]
    reader.read_parts(parts)
    assert all(out == data[at : at + len(out)] for at, out in parts)
    needs = {name for row in rows_of(flushing.store, PATHS[1]) for name in (row.name, *row.bases)}
    assert measured.snapshot()["get"]["requests"] - before == len(needs)


@pytest.mark.parametrize("exact", [False, True])
def test_reads_of_all_blocks_fetch_and_keep_the_chunk(objects, flushing, tmp_path, exact):
    row, raw = chunk_of(flushing, 7)
    measured = MeasuredObjects(objects)
    host = Host(tmp_path, measured, flushing.descriptor, nvme=0)
    host.tiers.cache.keeps_reads = True
    try:
        for shift in (
            0,
            MIB // 2,
        ):  # an eighth of each block, as of tensors on another mesh; then ram already has another eighth
            parts = [(at + shift, memoryview(bytearray(MIB // 8))) for at in range(0, 8 * MIB, MIB)]
            fetch(host.store, row, parts, "file", exact=exact)
            assert all(out == raw[at : at + len(out)] for at, out in parts)
        assert measured.snapshot()["get"]["requests"] == 1
        assert host.tiers.ram.usage().clean_bytes == len(raw)
    finally:
        host.close()


@pytest.mark.parametrize(("wanted", "whole"), [(2 * MIB, True), (1000, False)])
@pytest.mark.parametrize("blocks", [3, 12])
def test_the_base_of_a_whole_chunk_is_kept(objects, flushing, tmp_path, blocks, wanted, whole):
    # The next chunk is encoded against the rest of the base, however large the rest is.
    base, data = chunk_of(flushing, blocks)
    raw = data_like(data[: 2 * MIB])
    row = store_against(flushing.store, raw, base, data[: 2 * MIB])
    host = Host(tmp_path, MeasuredObjects(objects), flushing.descriptor, nvme=0)
    host.tiers.cache.keeps_reads = True
    try:
        out = bytearray(wanted)
        fetch(host.store, row, [(0, memoryview(out))], "file")
        assert out == raw[:wanted]
        assert host.tiers.ram.usage().clean_bytes == (len(raw) + len(data) if whole else 0)
    finally:
        host.close()


@pytest.mark.parametrize(("length", "whole"), [(10, False), (MIB, True)])
def test_one_small_range_of_a_small_chunk_is_no_reason_to_fetch_all_of_it(objects, flushing, tmp_path, length, whole):
    row, raw = chunk_of(flushing, 3)
    measured = MeasuredObjects(objects)
    host = Host(tmp_path, measured, flushing.descriptor, nvme=0)
    host.tiers.cache.keeps_reads = True
    try:
        out = bytearray(length)
        fetch(host.store, row, [(MIB, memoryview(out))], "file")
        assert out == raw[MIB : MIB + length]
        assert host.tiers.ram.usage().clean_bytes == (len(raw) if whole else 0)
    finally:
        host.close()


def test_bytes_wanted_twice_are_counted_once(objects, flushing, tmp_path):
    row, raw = chunk_of(flushing, 7)
    measured = MeasuredObjects(objects)
    host = Host(tmp_path, measured, flushing.descriptor, nvme=0)
    host.tiers.cache.keeps_reads = True
    try:
        parts = [(MIB, memoryview(bytearray(MIB))) for _ in range(20)]
        fetch(host.store, row, parts, "file", exact=True)
        assert all(out == raw[MIB : 2 * MIB] for _, out in parts)
        assert measured.snapshot()["get"]["bytes"] < 2 * MIB
    finally:
        host.close()


def test_blocks_between_those_that_are_wanted_are_not_fetched(objects, flushing):
    row, raw = chunk_of(flushing, 12)
    measured = MeasuredObjects(objects)
    parts = [(at, memoryview(bytearray(10))) for at in (MIB, 11 * MIB)]
    fetch(Store(measured, flushing.descriptor, url="store"), row, parts, "file", exact=True)
    assert all(out == raw[at : at + 10] for at, out in parts)
    assert measured.snapshot()["get"]["bytes"] < 3 * MIB


# -- a base with the same content --------------------------------------------------------------------------------------


def test_a_chunk_encoded_against_one_of_the_same_bytes_can_be_read(objects, flushing, tmp_path):
    raw = os.urandom(2 * MIB)
    alone = store_chunk(flushing.store, memoryview(raw))
    row = store_against(flushing.store, raw, alone, raw)
    assert row.bases == (alone.name,)
    host = Host(tmp_path, objects, flushing.descriptor, nvme=0)
    out = bytearray(len(raw))
    deadline(lambda: fetch(host.store, row, [(0, memoryview(out))], "file") or True)
    assert out == raw
    host.close()


def test_chunks_encoded_against_one_another_s_bytes_are_read_at_once(objects, flushing, tmp_path):
    one = os.urandom(2 * MIB)
    other = data_like(one)
    first = store_chunk(flushing.store, memoryview(one))
    second = store_chunk(flushing.store, memoryview(other))
    deltas = [
        (store_against(flushing.store, one, second, other), one),
        (store_against(flushing.store, other, first, one), other),
    ]
    assert all(row.bases for row, _ in deltas)
    for turn in range(5):
        host = Host(tmp_path, objects, flushing.descriptor, f"host{turn}", nvme=0)

        def read(delta, host=host):
            out = bytearray(2 * MIB)
            fetch(host.store, delta[0], [(0, memoryview(out))], "file")
            return out == delta[1]

        with ThreadPoolExecutor(4) as pool:
            assert deadline(lambda pool=pool, read=read: all(pool.map(read, deltas * 2)))
        host.close()


def test_a_chunk_that_stands_in_two_ways_is_read_by_the_one_that_is_named(flushing):
    one = os.urandom(MIB)
    other = data_like(one)
    first = store_chunk(flushing.store, memoryview(one))
    alone = store_chunk(flushing.store, memoryview(other))
    delta = store_against(flushing.store, other, first, one)
    assert alone.name.digest == delta.name.digest
    for row, gone in ((delta, alone.name), (alone, delta.name)):
        kept = flushing.objects.read(keys.chunk_key(gone), 1 << 30)[0]
        remove(flushing.objects, gone)
        out = bytearray(len(other))
        fetch(flushing.bare(), row, [(0, memoryview(out))], "file")
        assert out == other
        flushing.objects.put(keys.chunk_key(gone), [kept])


# -- many threads ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2])
def threads(request, with_processors):
    """The number of processors."""
    with_processors(request.param)
    return request.param


def chunk_of(flushing, blocks):
    """Store a chunk of ``blocks`` blocks of numbers and one of noise. Return its row and its bytes."""
    raw = Training(blocks * MIB // 4).master.tobytes() + os.urandom(MIB)

    plans = [BlockPlan(Coding(Codec.PLANE, 4), Reason.NO_BASE) for _ in blocks_of(raw)]
    return put_encoded(flushing.store, raw, Encoded(encoded_chunk(memoryview(raw), plans))), raw


@pytest.fixture
def streaming(tmp_path):
    """A store whose object tier streams bytes, the row of a chunk in it, and the chunk's bytes."""
    flushing = Flushing(LocalObjects(tmp_path / "store"))
    return flushing, *chunk_of(flushing, 8)


def test_a_streamed_chunk_keeps_one_block_in_memory(streaming, monkeypatch):
    flushing, row, raw = streaming
    measured = MeasuredObjects(flushing.store.objects)
    store = Store(measured, flushing.descriptor, url="store")
    lent, lend = [], Buffers.lend

    def lend_it(self, length):
        lent.append(length)
        return lend(self, length)

    monkeypatch.setattr(Buffers, "lend", lend_it)
    out = bytearray(len(raw))
    fetch(store, row, [(0, memoryview(out))], "file")
    assert out == raw
    assert measured.snapshot()["get"]["requests"] == 1
    assert max(lent) == MIB


@pytest.mark.parametrize("change", ["1", "16", "less", "more"])
def test_a_chunk_of_another_length_than_its_row_tells_is_refused(streaming, change):
    flushing, row, raw = streaming
    length = {"less": row.stored_length - 1, "more": row.stored_length + 1}.get(change) or int(change)
    with pytest.raises(CorruptionError):
        fetch(
            flushing.bare(),
            dataclasses.replace(row, stored_length=length),
            [(0, memoryview(bytearray(len(raw))))],
            "file",
        )


@pytest.mark.parametrize("length", [0, 17, 1 << 20, (1 << 32) - 1])
def test_a_chunk_that_lies_about_its_heads_length_is_refused(streaming, length):
    flushing, row, raw = streaming
    objects, key = flushing.store.objects, keys.chunk_key(row.name)
    stored = bytearray(objects.read(key, row.stored_length)[0])
    stored[12:16] = length.to_bytes(4, "little")
    objects.put(key, [stored])
    with pytest.raises((CorruptionError, FormatError)):
        fetch(flushing.bare(), row, [(0, memoryview(bytearray(len(raw))))], "file")


def test_a_bit_that_flips_in_a_chunk_that_comes_is_found(streaming):
    flushing, row, raw = streaming
    for seed in range(20):
        faulty = FaultyObjects(flushing.store.objects, seed=seed)
        store = Store(faulty, flushing.descriptor, url="store")
        faulty.inject(Fault.BIT_FLIP, method="get")
        out = bytearray(len(raw))
        fetch(store, row, [(0, memoryview(out))], "file")  # reads it a second time
        assert out == raw
        faulty.inject(Fault.BIT_FLIP, method="get")
        faulty.inject(Fault.BIT_FLIP, method="get")
        with pytest.raises((CorruptionError, FormatError)):
            fetch(store, row, [(0, memoryview(out))], "file")


def test_no_more_chunks_are_decoded_at_once_than_there_are_processors(streaming, monkeypatch):
    flushing, row, raw = streaming
    alone = Processors(1)
    monkeypatch.setattr("tierfs.store.read.fetch.processors", lambda: alone)
    going, most = [], []

    def slowly(*args):
        going.append(1)
        most.append(len(going))
        time.sleep(0.001)
        decode_block(*args)
        going.pop()

    monkeypatch.setattr("tierfs.store.read.fetch.decode_block", slowly)
    store = flushing.bare()
    outs = [bytearray(len(raw)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda out: fetch(store, row, [(0, memoryview(out))], "file"), outs))
    assert all(out == raw for out in outs)
    assert max(most) == 1


@pytest.mark.parametrize("codec", [Codec.PLANE, Codec.DPLANE])
def test_blocks_of_a_chunk_that_is_there_are_decoded_on_many_threads(flushing, monkeypatch, with_processors, codec):
    with_processors(2)
    row, raw = chunk_of(flushing, 8)
    if codec is Codec.DPLANE:
        base, reference, raw = row, raw, data_like(raw)
        row = store_against(flushing.store, raw, base, reference)
    seen, both = set(), threading.Event()

    def meet(*args):
        if args[0] == codec:
            seen.add(threading.get_ident())
            if len(seen) > 1:
                both.set()
            assert both.wait(HANG_S)
        decode_block(*args)

    monkeypatch.setattr("tierfs.store.read.fetch.decode_block", meet)
    out = bytearray(len(raw))
    fetch(flushing.bare(), row, [(0, memoryview(out))], "file")
    assert out == raw
    assert len(seen) == 2
    assert threading.get_ident() in seen


@pytest.mark.parametrize(("blocks", "start", "length"), [(3, MIB, MIB), (3, 5, 10), (1, 0, 2 * MIB), (0, 0, MIB)])
def test_small_blocks_are_decoded_on_this_thread(flushing, monkeypatch, blocks, start, length):
    row, raw = chunk_of(flushing, blocks)
    monkeypatch.setattr(Processors, "share_out", None)
    out = bytearray(length)
    fetch(flushing.bare(), row, [(start, memoryview(out))], "file")
    assert out == raw[start : start + length]


def test_the_first_damaged_block_is_named_and_nothing_is_written_any_more(flushing, objects, threads, monkeypatch):
    row, _ = chunk_of(flushing, 12)
    damage(objects, row.name, *(at * row.stored_length // 13 for at in (4, 6, 9)))
    going, messages, store = [], set(), flushing.bare()

    def slowly(*args):
        going.append(1)
        time.sleep(random.random() / 500)
        decode_block(*args)
        going.pop()

    monkeypatch.setattr("tierfs.store.read.fetch.decode_block", slowly)
    for _ in range(5):
        out = bytearray(row.raw_length)
        with pytest.raises(CorruptionError) as failed:
            fetch(store, row, [(0, memoryview(out))], "file")
        assert not going
        messages.add(str(failed.value))
    (message,) = messages
    assert "block 4 " in message


def test_deltas_are_read_at_once_with_few_helpers(saved, flushing, threads):
    def read(path):
        return load(flushing.bare(), path)

    def read_all():
        with ThreadPoolExecutor(2 * threads) as pool:
            return list(pool.map(read, PATHS * 4))

    assert deadline(read_all, 60) == [saved[path] for path in PATHS * 4]


# -- missing and damaged chunks ----------------------------------------------------------------------------------------


def damage(objects, name, *places):
    key = keys.chunk_key(name)
    data = bytearray(objects.read(key, 1 << 30)[0])
    for place in places or [-1]:
        data[place] ^= 1
    objects.put(key, [bytes(data)])


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_base_that_is_not_sound_is_named_and_not_used_again(saved, flushing, objects, how):
    delta = rows_of(flushing.store, PATHS[1])[1]
    (base,) = delta.bases
    if how == "missing":
        remove(objects, base)
    else:
        damage(objects, base, 1 << 16)  # in the first block, which the delta needs
    store = flushing.bare()
    said = {"missing": "missing", "damaged": "(damaged|does not decode)"}[how]
    with pytest.raises(CorruptionError, match=rf"run/step_2/shard.*encoded against.*{keys.chunk_key(base)}.*{said}"):
        load(store, PATHS[1])
    assert store.lease_cache.is_unusable(base)
    damaged = {found.path for found in verify(flushing.bare()).damage}
    assert damaged == set(PATHS)


@pytest.fixture
def patchwork(flushing):
    """Return a chunk whose odd blocks are deltas and whose other blocks are stored raw, with its bytes and its base."""
    raw = os.urandom(6 * MIB)
    base = store_chunk(flushing.store, memoryview(raw))
    changed = b"".join(
        os.urandom(MIB) if index % 2 else data_like(raw[index * MIB : (index + 1) * MIB]) for index in range(6)
    )
    row = store_against(flushing.store, changed, base, raw)
    assert flushing.codecs_of([row]) == {"DPLANE": 3, "STORE": 3}
    return row, changed, base


def test_blocks_of_a_base_that_nobody_needs_are_not_fetched(patchwork, flushing, objects):
    row, changed, _ = patchwork
    measured = MeasuredObjects(objects)
    out = memoryview(bytearray(6 * MIB))
    fetch(Store(measured, flushing.descriptor, url="store"), row, [(0, out)], "file")
    assert out == changed
    assert measured.snapshot()["get"]["bytes"] < row.stored_length + 4 * MIB


def test_a_damaged_block_of_a_base_keeps_nobody_from_reading_what_needs_others(patchwork, flushing, objects):
    row, changed, base = patchwork
    head = base.stored_length - base.raw_length
    damage(objects, base.name, head + MIB)
    out = memoryview(bytearray(6 * MIB))
    fetch(flushing.bare(), row, [(0, out)], "file")
    assert out == changed
    damage(objects, base.name, head + 2 * MIB)
    with pytest.raises(CorruptionError, match=r"encoded against.*block 2 does not have its digest"):
        fetch(flushing.bare(), row, [(0, out)], "file")
    fetch(flushing.bare(), row, [(MIB, out[:MIB])], "file")
    assert out[:MIB] == changed[MIB : 2 * MIB]


def test_a_damaged_block_of_a_base_that_would_be_kept_whole_keeps_nobody_either(patchwork, flushing, objects, tmp_path):
    row, changed, base = patchwork
    damage(objects, base.name, base.stored_length - base.raw_length + MIB)
    host = Host(tmp_path, objects, flushing.descriptor, nvme=0)
    host.tiers.cache.keeps_reads = True
    try:
        out = memoryview(bytearray(6 * MIB))
        fetch(host.store, row, [(0, out)], "file")
        assert out == changed
        with pytest.raises(CorruptionError, match="block 1 does not have its digest"):
            fetch(host.store, base, [(0, out)], "file")
        with pytest.raises(CorruptionError, match="block 1 does not have its digest"):
            fetch(host.store, base, [(0, out[: 2 * MIB])], "file")
        assert host.tiers.counters["damaged_chunks_read_in_part"] == 2
    finally:
        host.close()


def test_a_chain_that_is_too_long_is_refused(flushing):
    pieces = [os.urandom(MIB)]
    for _ in range(3):
        pieces.append(data_like(os.urandom(1) + pieces[-1][1:]))
    rows = [store_chunk(flushing.store, memoryview(pieces[0]))]
    for raw, before in zip(pieces[1:], pieces, strict=False):
        rows.append(store_against(flushing.store, raw, rows[-1], before))
    out = memoryview(bytearray(MIB))
    fetch(flushing.bare(), rows[2], [(0, out)], "file")  # chain_max + 1 steps, as if derived from a delta
    with pytest.raises(FormatError, match="each encoded against the next"):
        fetch(flushing.bare(), rows[3], [(0, out)], "file")


def test_a_delta_that_stands_alone_is_found_in_a_directory_too(tmp_path, descriptor):
    tier = LocalObjects(str(tmp_path))
    store = Store(tier, dataclasses.replace(descriptor, endpoint=tier.capabilities), url="store")
    base = os.urandom(MIB)
    raw = data_like(base)
    row = store_against(store, raw, store_chunk(store, memoryview(base)), base)
    unnamed = dataclasses.replace(row, name=keys.ChunkName(row.name.digest), stored_length=0)
    assert row.name != unnamed.name
    assert find_chunk(store, unnamed, "f") == row


def test_objects_beside_chunks_are_ignored(saved, flushing, objects):
    row = rows_of(flushing.store, PATHS[1])[1]
    alone = keys.ChunkName(row.name.digest)
    objects.put(f"{keys.chunk_key(alone)}.bak", [b"x"])
    assert find_chunk(flushing.bare(), dataclasses.replace(row, name=alone, stored_length=0), "f") == row
    remove(objects, row.name)
    with pytest.raises(CorruptionError, match="no tier holds chunk"):
        find_chunk(flushing.bare(), dataclasses.replace(row, name=alone, stored_length=0), "f")


def test_a_delta_whose_base_is_gone_is_not_found(saved, flushing):
    row = rows_of(flushing.store, PATHS[1])[1]
    remove(flushing.store.objects, *row.bases)
    with pytest.raises(CorruptionError, match="no tier holds chunk"):
        find_chunk(
            flushing.bare(), dataclasses.replace(row, name=keys.ChunkName(row.name.digest), stored_length=0), "f"
        )


def test_an_envelope_names_its_bases(saved, flushing):
    for row in rows_of(flushing.store, PATHS[1]):
        found = inspect(flushing.bare(), row.name, row.raw_length)
        assert set(found.bases) == set(row.bases)
        assert dataclasses.replace(found, bases=row.bases) == row


def test_sound_deltas_are_no_damage_and_orphans_neither(saved, flushing):
    delete(flushing.store, PATHS[1])
    report = verify(flushing.bare())
    assert (report.files, report.damage) == (1, [])


# -- manifests move with the chunks they need --------------------------------------------------------------------------


def requests(measured, action):
    before = measured.snapshot()
    action()
    after = measured.snapshot()
    return sum(after[method]["requests"] - before[method]["requests"] for method in ("get", "head", "put"))


@pytest.mark.parametrize("verb", [copy, rename])
def test_a_file_of_deltas_moves_without_a_request_for_each(saved, flushing, objects, verb):
    measured = MeasuredObjects(objects)
    store = Store(measured, flushing.descriptor, url="store", clock=flushing.clock)
    store.lease_cache.ensure()
    assert requests(measured, lambda: verb(store, PATHS[1], "moved")) <= 3
    delete(store, PATHS[0])
    assert load(flushing.bare(), "moved") == saved[PATHS[1]]
    assert {name for row in rows_of(store, "moved") for name in row.bases}


@pytest.mark.parametrize("verb", [copy, rename])
def test_a_file_whose_bases_are_condemned_moves_onto_new_chunks(saved, flushing, objects, verb):
    bases = {name for row in rows_of(flushing.store, PATHS[1]) for name in row.bases}
    condemn(objects, *bases)
    store = flushing.bare()
    verb(store, PATHS[1], "moved")
    remove(objects, *bases)
    assert load(flushing.bare(), "moved") == saved[PATHS[1]]


def test_a_file_that_is_known_by_its_manifest_alone_is_checked_again_in_the_next_lease(saved, flushing, objects):
    store = flushing.bare()
    writer = Writer(store, PATHS[1], mode=WriteMode.APPEND)
    writer.write(b"more")
    bases = {name for row in rows_of(store, PATHS[1]) for name in row.bases}
    flushing.clock.sleep(61)
    remove(objects, *bases)
    with pytest.raises(Exception, match="write the file again"):
        writer.commit()


def test_a_file_of_deltas_is_appended_to(saved, flushing):
    writer = Writer(flushing.store, PATHS[1], mode=WriteMode.APPEND)
    writer.write(b"more")
    writer.commit()
    rename(flushing.store, PATHS[0], "elsewhere")
    delete(flushing.store, "elsewhere")
    assert load(flushing.bare(), PATHS[1]) == saved[PATHS[1]] + b"more"


# -- through the tiers -------------------------------------------------------------------------------------------------


def test_saves_go_through_local_tiers_to_another_host(make_host):
    here = make_host("here", ram=64 * MIB)
    training, contents = Training(8 * MIB), {}
    for step in range(3):
        path = f"run/step_{step}/shard"
        contents[path] = training.step().pair()
        save(here.store, path, contents[path])
    wait(here.store, "", Level.OBJECT)
    there = make_host("there")
    for path, data in contents.items():
        assert load(there.store, path) == data
    assert not verify(here.plain()).damage


def test_a_file_larger_than_the_ram_tier_is_encoded_against_the_one_before(make_host):
    here = make_host("here", ram=24 * MIB, nvme=256 * MIB)
    training, contents = Training(8 * MIB), {}  # files of 48 MiB
    for step in range(2):
        path = f"run/step_{step}/shard"
        contents[path] = training.step().pair()
        save(here.store, path, contents[path])
        wait(here.store, path, Level.OBJECT)
    for path, data in contents.items():
        assert load(here.plain(), path) == data
    assert any(row.bases for row in rows_of(here.plain(), "run/step_1/shard"))
    assert not verify(here.plain()).damage
