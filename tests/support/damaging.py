"""Small stores with a manual clock, and helpers that damage, collect and repair them."""

import copy
import random
import uuid
from dataclasses import replace
from types import SimpleNamespace

from support.served import ServedObjects
from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.store import Store
from tierfs.store.encode.pipeline import Codecs
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.maintenance.repair import repair
from tierfs.store.maintenance.scrub import ScrubOptions
from tierfs.store.tree.records import observe
from tierfs.testing import FaultyObjects
from tierfs.testing.faults import flip_bit

LEASE_S, GRACE_S = 20, 60
LOOK = ScrubOptions(heal=False, concurrency=1)


def make_store(codecs="off", root=None):
    clock = ManualClock()
    tier = ServedObjects(root or f"/repair-{uuid.uuid4().hex}", clock)
    descriptor = Descriptor(
        "0" * 32, 0, DigestKind.XXH3_128, tier.capabilities, inline_bytes=0, lease_s=LEASE_S, grace_s=GRACE_S
    )
    tier.put(keys.DESCRIPTOR, [descriptor.encode()])
    return Store(tier, descriptor, url=f"store-{tier.root}", clock=clock, codecs=Codecs.parse(codecs))


def copied(store):
    """Return the store with an object tier and a clock of its own, both as they are now."""
    clock = copy.copy(store.clock)
    tier = ServedObjects(f"/copy-{uuid.uuid4().hex}", clock)
    for item in store.objects.list(""):
        tier.put(item.key, [store.objects.read(item.key, item.size)[0]])
    tier.times.update(store.objects.times)
    return Store(tier, store.descriptor, url=store.url, clock=clock)


def make_world(**options):
    """Return a store with its clock and object tier, and functions that open it anew, collect it and count objects.

    ``options`` change its descriptor. Stores that are opened draw the same ids in each world.
    """
    store = make_store("auto")
    store.descriptor = replace(store.descriptor, **options)
    tier, drawn = store.objects, random.Random(1)

    def open_on(objects=tier):
        return Store(objects, store.descriptor, url="store", clock=store.clock, random_bytes=drawn.randbytes)

    def collected(objects=tier, **how):
        return collect(open_on(objects), GcOptions(concurrency=1, **how))

    return SimpleNamespace(
        clock=store.clock,
        tier=tier,
        open_on=open_on,
        gc=collected,
        count=lambda prefix: len(keys_below(store, prefix)),
        store=open_on(),
    )


def content(number, size=3000):
    return random.Random(number).randbytes(size + number)


def reopened(store, *plan, objects=None):
    """Return the store as another process opens it, with planned faults of its object tier."""
    objects = FaultyObjects(store.objects, plan) if plan else objects or store.objects
    return Store(objects, store.descriptor, url="again", clock=store.clock)


def middle(store, key):
    flip_bit(store.objects, key, 8 * (store.objects.head(key).size // 2) + 3)


def twice(store, key):
    middle(store, key)
    flip_bit(store.objects, key, 8 * (store.objects.head(key).size // 2 + 1))


def chunk_of(store, path):
    (row,) = observe(store, path).manifest.rows
    return keys.chunk_key(row.name)


def lost_keys(store):
    return [item.key for item in store.objects.list(keys.LOST)]


def run(store, **how):
    return repair(store, concurrency=1, **how)


def gc(store, objects=None, **how):
    return collect(reopened(store, objects=objects), GcOptions(concurrency=1, **how))


def pass_grace(store):
    store.clock.sleep(GRACE_S + 5)


def paths(store):
    """Return the paths of all live files."""
    return [keys.parse_record_key(item.key) for item in store.objects.list(keys.TREE) if item.size > 80]


def keys_below(store, prefix):
    return {item.key for item in store.objects.list(prefix)}
