"""Small stores with a manual clock, and helpers that damage and repair them."""

import random
import uuid

from support.served import ServedObjects
from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.store import Store
from tierfs.store.encode.codecs import Codecs
from tierfs.store.maintenance.repair import repair
from tierfs.store.maintenance.scrub import ScrubOptions
from tierfs.store.tree.records import observe
from tierfs.testing import FaultyObjects
from tierfs.testing.damage import flip_bit

LOOK = ScrubOptions(heal=False, concurrency=1)


def make_store(codecs="off", root=None):
    clock = ManualClock()
    tier = ServedObjects(root or f"/repair-{uuid.uuid4().hex}", clock)
    descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, tier.capabilities, inline_bytes=0, lease_s=20, grace_s=60)
    tier.put(keys.DESCRIPTOR, [descriptor.encode()])
    return Store(tier, descriptor, url=f"store-{tier.root}", clock=clock, codecs=Codecs.parse(codecs))


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
