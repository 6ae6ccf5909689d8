"""A store whose object tier refuses every put, so that written data stays in the host's local tiers."""

import contextlib
import os

from support.waiting import HANG_S
from tierfs.digest import DigestKind
from tierfs.errors import StoreError
from tierfs.host.pending.levels import Level
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.session.settings import ResolvedTiers
from tierfs.session.tiers import TieredStore, home_of, tiers_for
from tierfs.store import Store
from tierfs.store.create import create_store

URL = "memory://store"


class _Refusing(MemoryObjects):
    def put(self, *_args, **_kwargs):
        raise StoreError("the object tier takes nothing", transient=True)


@contextlib.contextmanager
def held_store(tmp_path):
    root = f"/held-{os.urandom(8).hex()}"
    descriptor, _ = create_store(MemoryObjects(root), URL, digest=DigestKind.XXH3_128, random_bytes=os.urandom(16))
    settings = ResolvedTiers(Level.STAGED, 64 << 20, 0, tmp_path / "host", 20.0)
    objects = _Refusing(root)
    target = TieredStore(descriptor.uuid, URL, objects.places(), {}, DigestKind.XXH3_128, False, True)
    tiers = tiers_for(target, settings, lambda: Store(objects, descriptor, url=URL), home_of(target, settings))
    try:
        yield Store(objects, descriptor, url=URL, tiers=tiers, ack=Level.STAGED, timeout_s=HANG_S)
    finally:
        tiers.close()
