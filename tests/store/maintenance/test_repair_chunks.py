"""Repair and scrub of single chunk objects."""

import uuid
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.damaging import LOOK, chunk_of, content, lost_keys, make_store, reopened, run
from support.saving import Flushing, Training

from tierfs.codec import Codec
from tierfs.format import keys
from tierfs.format.envelope import Block, Envelope
from tierfs.objects import MemoryObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store, delete, load, save, verify
from tierfs.store.maintenance.scrub import ScrubOptions, scrub
from tierfs.store.tree.records import observe, publish
from tierfs.testing.faults import flip_bit, remove, truncate

MIB = 1 << 20


def test_a_chunk_with_a_codec_of_a_newer_tierfs_is_left():
    store = make_store()
    save(store, "a", content(0, 3 * MIB))
    key = chunk_of(store, "a")
    data, _ = store.objects.read(key, 4 * MIB)
    envelope = Envelope.decode(data, "", stored_length=len(data))
    newer = replace(envelope, blocks=(Block(envelope.blocks[0].digest, 99, 100), *envelope.blocks[1:]))
    start = envelope.header_length
    payload = newer.encode() + data[start : start + 100] + data[start + MIB :]
    store.objects.put(key, [payload])
    observed = observe(store, "a")
    (row,) = observed.manifest.rows
    rows = (replace(row, stored_length=len(payload)),)
    publish(store, observed, replace(observed.manifest, rows=rows))

    found = scrub(reopened(store), ScrubOptions(concurrency=1)).damage
    assert [(each.key, each.kind, each.healed) for each in found] == [(key, "format", "")]
    report = run(reopened(store))
    assert [(each.key, each.how) for each in report.left] == [(key, "a newer tierfs may have written it")]
    assert (report.mended, report.moved, lost_keys(store)) == ([], [], [])
    assert store.objects.read(key, 4 * MIB)[0] == payload


ALONE = {
    Codec.STORE: content(0, 3 * MIB),
    Codec.ZSTD: b"nothing new under the sun\n" * 100_000,
    Codec.CONST: bytes(3 * MIB),
    Codec.PLANE: np.random.default_rng(0).standard_normal(700_000, np.float32).tobytes(),
}
"""For each codec without a base, bytes that the encoder gives it."""


@pytest.mark.parametrize("codec", [codec for codec in Codec if not codec.base_factor])
def test_a_chunk_of_any_codec_is_encoded_anew(codec):
    store, other = make_store("all"), make_store("off")
    for each in (store, other):
        save(each, "a", ALONE[codec])
    key = chunk_of(store, "a")
    before, _ = store.objects.read(key, 4 * MIB)
    assert {block.codec for block in Envelope.decode(before, "", stored_length=len(before)).blocks} == {codec}
    remove(store.objects, key)
    report = run(reopened(store), replicas=[other])
    assert ([each.key for each in report.mended], report.lost) == ([key], [])
    assert load(reopened(store), "a") == ALONE[codec]


class CountedLists(WrappedObjects):
    """Count the listings of each prefix."""

    def __init__(self, inner):
        super().__init__(inner)
        self.lists = Counter()

    def list(self, prefix, *, delimiter=False):
        self.lists[prefix] += 1
        return super().list(prefix, delimiter=delimiter)


def test_each_prefix_is_listed_a_few_times_for_many_lost_chunks():
    store = make_store()
    for number in range(300):
        save(store, f"file-{number}", content(number, 100))
    for item in list(store.objects.list(keys.CHUNKS)):
        remove(store.objects, item.key)
    objects = CountedLists(store.objects)
    assert len(run(reopened(store, objects=objects)).lost) == 300
    assert max(count for prefix, count in objects.lists.items() if prefix.startswith(keys.CHUNKS)) == 2


class Steps:
    """A file that was saved twice. Its chunks are encoded against chunks that no file names."""

    def __init__(self, seed):
        self.objects = MemoryObjects(f"/bases-{uuid.uuid4().hex}")
        self.flushing = Flushing(self.objects)
        training = Training(1 << 18, seed=seed)
        self.first = training.file()
        self.flushing.save("a", self.first)
        self.copy = MemoryObjects(f"/copy-{uuid.uuid4().hex}")
        for item in list(self.objects.list("")):
            self.copy.put(item.key, [self.objects.read(item.key, 1 << 30)[0]])
        self.data = training.step().file()
        rows = self.flushing.save("a", self.data)
        self.row = max((row for row in rows if row.bases), key=lambda row: row.stored_length)
        self.key, self.base = keys.chunk_key(self.row.name), keys.chunk_key(self.row.bases[0])

    def replica(self):
        """Return a copy of the store from before the second save."""
        return Store(self.copy, self.flushing.descriptor, url="replica", clock=self.flushing.clock)


@pytest.fixture(params=[0, 3])
def steps(request):
    """Two saves whose base key sorts before the delta's key or, for the other parameter, after it."""
    found = Steps(request.param)
    assert (found.base < found.key) == (request.param == 3)
    return found


def test_a_chunk_is_no_loss_where_its_base_is_healed(steps):
    flip_bit(steps.objects, steps.base, 8 * 20 + 1)
    scrub(steps.flushing.bare(), LOOK)
    would = run(steps.flushing.bare(), dry_run=True, replicas=[steps.replica()])
    assert ([each.key for each in would.mended], would.is_whole) == ([steps.base], True)
    assert [(each.key, each.how) for each in would.left] == [
        (steps.key, "a run without --dry-run heals the base, then checks this")
    ]
    report = run(steps.flushing.bare(), replicas=[steps.replica()])
    assert [each.key for each in report.mended] == [steps.base]
    assert (report.left, report.lost) == ([], [])
    assert verify(steps.flushing.bare()).damage == []


@pytest.mark.parametrize("damage", [remove, lambda objects, key: truncate(objects, key, 500)])
def test_a_base_that_no_file_names_is_healed(steps, damage):
    damage(steps.objects, steps.base)
    scrub(steps.flushing.bare(), LOOK)
    report = run(steps.flushing.bare(), replicas=[steps.replica()])
    assert [(each.key, each.how) for each in report.mended] == [(steps.base, "replica")]
    assert (report.left, report.lost) == ([], [])
    assert load(steps.flushing.bare(), "a") == steps.data


def test_a_delta_without_its_base_is_damage_only_where_a_file_needs_it(steps):
    store = steps.flushing.bare()
    remove(steps.objects, steps.base)
    assert verify(store).damage
    assert scrub(store, LOOK).missing == 1
    delete(store, "a")
    assert verify(store).damage == []
    assert scrub(store, LOOK).damage == []
