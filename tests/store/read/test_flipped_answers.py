"""A bit that flips in one answer of the object tier changes no result: the answer is asked for again."""

import pytest
from support.damaging import chunk_of, content, copied, make_store, reopened, twice

from tierfs.format import keys
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import delete, load, make_directory, save, stat, usage, verify
from tierfs.store.create import read_descriptor
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.maintenance.repair import repair
from tierfs.store.maintenance.scrub import ScrubOptions, scrub
from tierfs.store.status import condition
from tierfs.store.tree.references import write_references

FILES = {"a": content(0), "b": b"one" * 1000, "run/__0_0": content(2), "run/.metadata": content(3)}
VERSION_BIT, MIDDLE_BIT = 8 * 8 + 1, None


class FlippedAnswer(WrappedObjects):
    """Flips one bit of one answer that holds bytes of an object."""

    def __init__(self, inner, at, bit):
        super().__init__(inner)
        self.left, self.bit = at, bit

    def flip(self, data):
        self.left -= 1
        if self.left == -1 and len(data):
            bit = 8 * (len(data) // 2) if self.bit is None else min(self.bit, 8 * len(data) - 1)
            data[bit // 8] ^= 1 << bit % 8

    def read(self, key, limit):
        data, info = super().read(key, limit)
        changed = bytearray(data)
        self.flip(changed)
        return bytes(changed), info

    def get(self, key, ranges, *, version=None):
        info = super().get(key, ranges, version=version)
        self.flip(ranges[0][1])
        return info


def make_world():
    """Return a store with an object of every kind, and a condemned chunk."""
    store = make_store("zstd")
    for path, data in FILES.items():
        save(store, path, data)
    write_references(store, "run")
    make_directory(store, "empty")
    save(store, "gone", content(77))
    delete(store, "gone")
    store.clock.sleep(100)
    collect(store, GcOptions(concurrency=1))
    scrub(store, ScrubOptions(concurrency=1))
    store.clock.sleep(100)
    return store


def gc(store):
    return collect(store, GcOptions(concurrency=1)).as_dict()


def scrub_all(store):
    report = scrub(store, ScrubOptions(concurrency=1))
    return report.chunks, report.bytes, report.damage, report.known


def save_again(store):
    save(store, "c", content(77))  # in the condemned list
    save(store, "d", FILES["a"])
    return sorted(item.key for item in store.objects.list(keys.CHUNKS))


OPERATIONS = [
    lambda store: {path: load(store, path) for path in FILES},
    lambda store: [stat(store, path).manifest.length for path in FILES],
    lambda store: read_descriptor(store.objects, store.url).uuid,
    verify,
    usage,
    gc,
    scrub_all,
    save_again,
    lambda store: repair(store, concurrency=1).as_dict(),
    lambda store: {name: found["ended_ns"] > 0 for name, found in condition(store)["upkeep"].items()},
]
NAMES = ["load", "stat", "descriptor", "verify", "usage", "gc", "scrub", "save", "repair", "status"]


@pytest.mark.parametrize("bit", [VERSION_BIT, MIDDLE_BIT], ids=["version", "middle"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_a_flipped_bit_in_an_answer_is_read_again(operation, bit):
    world = make_world()
    store = copied(world)
    link = FlippedAnswer(store.objects, 1 << 30, bit)
    right = operation(reopened(store, objects=link))
    answers = (1 << 30) - link.left
    assert answers
    for at in range(answers):
        store = copied(world)
        link = FlippedAnswer(store.objects, at, bit)
        assert operation(reopened(store, objects=link)) == right, f"answer {at} of {answers}"
        assert link.left < 0
        assert verify(store).damage == []


@pytest.mark.parametrize("which", [lambda store: keys.record_key("a"), lambda store: chunk_of(store, "a")])
def test_repair_reads_the_answer_of_a_copy_again(which):
    for at in range(8):
        store, copy = make_store(), make_store()
        copy.descriptor = store.descriptor
        save(store, "a", FILES["a"])
        for item in store.objects.list(""):
            copy.objects.put(item.key, [store.objects.read(item.key, 1 << 20)[0]])
        twice(store, which(store))
        replica = reopened(copy, objects=FlippedAnswer(copy.objects, at, MIDDLE_BIT))
        assert repair(store, replicas=[replica], damaged=[which(copy)], concurrency=1).is_whole, f"answer {at}"
        assert load(reopened(store), "a") == FILES["a"]
