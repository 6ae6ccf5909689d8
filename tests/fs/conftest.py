"""Fixtures of the filesystem tests: a store in memory and one in a directory."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support import opened
from support.waiting import HANG_S

import tierfs
from tierfs.format import keys
from tierfs.objects import ObjectTier
from tierfs.objects.wrappers.limits import MeasuredObjects
from tierfs.session import open_store, parse_url
from tierfs.store import Store
from tierfs.testing import FaultyObjects
from tierfs.threads import transfers


@dataclass(frozen=True)
class Place:
    """A fresh store, and the means to inspect it."""

    protocol: str
    root: str
    fs: tierfs.TierFileSystem

    def __truediv__(self, name: str) -> str:
        """Return a path in the store, as the filesystem writes it."""
        return f"{self.root}/{name}"

    @property
    def bare(self) -> str:
        """The store's root as a URL without ``tierfs::``."""
        return f"{self.protocol}://{self.root}"

    @property
    def url(self) -> str:
        return f"tierfs::{self.bare}"

    @property
    def raw(self) -> fsspec.AbstractFileSystem:
        """The filesystem that holds the store."""
        options = {"auto_mkdir": True} if self.protocol == "file" else {}
        return fsspec.filesystem(self.protocol, **options)

    @property
    def store(self) -> Store:
        return open_store(parse_url(self.bare))[0]

    def names(self, path: str = "") -> list[str]:
        """Return every file below ``path``, relative to the root."""
        return [name[len(self.root) + 1 :] for name in self.fs.find(self / path if path else self.root)]

    def chunks(self) -> set[str]:
        """Return the keys of the chunk objects."""
        return {item.key for item in self.store.objects.list(keys.CHUNKS)}

    def requests(self) -> dict[str, int]:
        """Return the number of requests to the object tier so far, by method."""
        objects = self.store.objects
        assert isinstance(objects, MeasuredObjects)
        return {method: int(counted["requests"]) for method, counted in objects.snapshot().items()}


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="tierfs-test-", dir=opened.SHARED)
    yield directory
    _settle()
    shutil.rmtree(directory)


@contextlib.contextmanager
def _memory_root() -> Iterator[str]:
    root = f"/bucket-{uuid.uuid4().hex}"
    yield root
    _settle()
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"{root}/")]:
        del MemoryFileSystem.store[path]
    MemoryFileSystem.pseudo_dirs[:] = [path for path in MemoryFileSystem.pseudo_dirs if not path.startswith(root)]


def _settle() -> None:
    """Wait for the transfers of dropped handles: until every transfer thread is free at the same time."""
    moving = transfers()
    together = threading.Barrier(moving.workers)
    for future in [moving.submit(lambda _: together.wait(HANG_S), None) for _ in range(moving.workers)]:
        future.result()


def _make(protocol: str, root: str) -> Place:
    tierfs.init(f"{protocol}://{root}")
    # A new instance: a failed test may have left a transaction open on the shared one.
    return Place(protocol, root, tierfs.TierFileSystem(target_protocol=protocol, skip_instance_cache=True))


@pytest.fixture
def scratch() -> Iterator[str]:
    """A directory in memory if there is one, since syncing costs nothing there."""
    with _scratch() as directory:
        yield directory


@pytest.fixture
def memory_root() -> Iterator[str]:
    """A path in fsspec's memory filesystem. It is emptied after the test."""
    with _memory_root() as root:
        yield root


@pytest.fixture
def other_memory_root() -> Iterator[str]:
    """A second path like `memory_root`."""
    with _memory_root() as root:
        yield root


@pytest.fixture
def memory_place(memory_root: str) -> Place:
    return _make("memory", memory_root)


@pytest.fixture
def directory_place(scratch: str) -> Place:
    return _make("file", f"{scratch}/store")


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest) -> Place:
    name = "memory_place" if request.param == "memory" else "directory_place"
    found: Place = request.getfixturevalue(name)
    return found


@pytest.fixture
def put_between(place, monkeypatch) -> Callable[[Callable[[ObjectTier], ObjectTier]], ObjectTier]:
    """A function that puts a wrapper between the place's store and its object tier, and returns the wrapper."""

    def put(wrap: Callable[[ObjectTier], ObjectTier]) -> ObjectTier:
        monkeypatch.setattr(place.store, "_objects", wrap(place.store.objects))
        return place.store.objects

    return put


@pytest.fixture
def faulty(put_between) -> FaultyObjects:
    """An object tier of the place's store in which faults can be injected."""
    return put_between(FaultyObjects)


@pytest.fixture(params=["memory", "file"], scope="module")
def module_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place that the tests of a module share."""
    if request.param == "memory":
        with _memory_root() as root:
            yield _make("memory", root)
    else:
        with _scratch() as directory:
            yield _make("file", f"{directory}/store")


@pytest.fixture(scope="session")
def random_bytes() -> Callable[[int, int], bytes]:
    """``random_bytes(count, seed)``: bytes that no codec makes smaller, the same for the same seed."""
    return functools.lru_cache(maxsize=8)(lambda count, seed: Random(seed).randbytes(count))
