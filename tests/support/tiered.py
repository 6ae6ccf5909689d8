"""A host with a store in memory behind its own local tiers, and an object tier that can be down."""

import contextlib

import numpy as np

from support.waiting import HANG_S
from tierfs.digest import DigestKind
from tierfs.errors import StoreError
from tierfs.host.pending.levels import Level
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.session.settings import ResolvedTiers
from tierfs.session.tiers import TieredStore, home_of, tiers_for
from tierfs.store import (
    Writer,
)
from tierfs.store.store import Store

MIB = 1 << 20
BIG = 40 * MIB


class Host:
    """One host: its own state directory, and a store opened there with local tiers."""

    def __init__(self, tmp_path, objects, descriptor, name="here", ram=128 * MIB, nvme=128 * MIB, ack=Level.STAGED):
        self.settings = ResolvedTiers(ack, ram, nvme, tmp_path / name, HANG_S)
        self.objects, self.descriptor = objects, descriptor
        self.open()

    def open(self):
        target = TieredStore(
            self.descriptor.uuid, "memory://store", self.objects.places(), {}, DigestKind.XXH3_128, False, True
        )
        self.tiers = tiers_for(target, self.settings, self.plain, home_of(target, self.settings))
        self.store = Store(
            self.objects,
            self.descriptor,
            url="memory://store",
            tiers=self.tiers,
            ack=self.settings.ack,
            timeout_s=HANG_S,
            state_dir=self.settings.directory,
        )

    @property
    def flusher(self):
        """The flusher, which runs on a thread of this process after the first write."""
        return self.tiers.flusher._launcher._service._engine._flusher

    @property
    def flushing(self):
        """The state of the flusher: which drafts it knows, and what it waits for."""
        return self.flusher._state

    def plain(self):
        return Store(self.objects, self.descriptor, url="memory://store", state_dir=self.settings.directory)

    def close(self):
        self.tiers.close()

    @contextlib.contextmanager
    def held(self, *methods):
        """Make the object tier refuse everything, or these methods, so that data stays in the local tiers."""
        self.objects.down = methods or True
        try:
            yield
        finally:
            self.objects.down = False


METHODS = ("put", "get", "read", "head", "list", "delete")


class Gate(MemoryObjects):
    """An object tier that refuses requests while `down` is set: all of them if it is True, else those it names."""

    down = False

    def __getattribute__(self, name):
        down = object.__getattribute__(self, "down")
        if name in METHODS and (down is True or (down and name in down)):

            def refuse(*_args, **_kwargs):
                raise StoreError("the object tier is down", transient=True)

            return refuse
        return super().__getattribute__(name)


def content(size=BIG):
    """Return random bytes. The kernel would take several times as long to generate them."""
    return np.random.SFC64().random_raw(-(-size // 8)).tobytes()[:size]


def save_at(store, path, data, level):
    writer = Writer(store, path, level=level)
    writer.write(data)
    writer.commit()
