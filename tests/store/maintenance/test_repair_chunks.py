"""Repair and scrub of single chunk objects."""

from collections import Counter
from dataclasses import replace

from support.damaging import chunk_of, content, lost_keys, make_store, reopened, run

from tierfs.format import keys
from tierfs.format.envelope import Block, Envelope
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import save
from tierfs.store.maintenance.scrub import ScrubOptions, scrub
from tierfs.store.tree.records import observe, publish
from tierfs.testing.damage import remove

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
    publish(store, observed, replace(observed.manifest, rows=rows, previous=observed.previous))

    found = scrub(reopened(store), ScrubOptions(concurrency=1)).damage
    assert [(each.key, each.kind, each.healed) for each in found] == [(key, "format", "")]
    report = run(reopened(store))
    assert [(each.key, each.how) for each in report.left] == [(key, "a newer tierfs may have written it")]
    assert (report.mended, report.moved, lost_keys(store)) == ([], [], [])
    assert store.objects.read(key, 4 * MIB)[0] == payload


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
