"""Every backend and every wrapper does what an object tier must do."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from support.private_memory import PrivateMemory

from tierfs.clock import ManualClock
from tierfs.errors import AlreadyExistsError
from tierfs.objects import (
    CREATE,
    FsspecObjects,
    LimitedObjects,
    LocalObjects,
    MeasuredObjects,
    MemoryObjects,
    ObjectTier,
    RetryingObjects,
)
from tierfs.testing import Fault, FaultyObjects, ObjectTierTests, PlannedFault


@pytest.fixture
def memory() -> Iterator[MemoryObjects]:
    objects = MemoryObjects(f"/conformance-{uuid.uuid4().hex}")
    yield objects
    objects.delete([listed.key for listed in objects.list("")])


class TestLocalObjects(ObjectTierTests):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> ObjectTier:
        return LocalObjects(tmp_path / "store")


class TestMemoryObjects(ObjectTierTests):
    @pytest.fixture
    def objects(self, memory: MemoryObjects) -> ObjectTier:
        return memory


class TestFsspecObjectsOnLocal(ObjectTierTests):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> ObjectTier:
        return FsspecObjects(fsspec.filesystem("file"), f"{tmp_path}/store")


class TestFsspecObjectsOnMemory(ObjectTierTests):
    @pytest.fixture
    def objects(self) -> ObjectTier:
        return FsspecObjects(PrivateMemory(), "memory://bucket/store/")


class TestStackOnLocal(ObjectTierTests):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> ObjectTier:
        backend = LocalObjects(tmp_path / "store")
        return MeasuredObjects(RetryingObjects(LimitedObjects(backend), clock=ManualClock()))


class TestRetriesOverFaults(ObjectTierTests):
    """A tier that fails now and then passes the suite if failed requests are retried often enough."""

    @pytest.fixture
    def objects(self, memory: MemoryObjects) -> ObjectTier:
        methods = ("put", "get", "read", "head", "list", "delete", "delete_version")
        plan = [
            PlannedFault(Fault.REFUSED, method, after)
            for method, after in itertools.product(methods, (0, 1, 3, 4, 7, 20, 50, 90, 500))
        ]
        # Puts lose no responses: if a conditional put meets its own first attempt, its caller must decide.
        plan += [
            PlannedFault(Fault.LOST_RESPONSE, method, after)
            for method, after in itertools.product(("get", "read", "head", "list", "delete"), (0, 2, 5, 30))
        ]
        return RetryingObjects(FaultyObjects(memory, plan), attempts=20, clock=ManualClock())


class TestRetriesOverLostResponses:
    def test_a_create_that_meets_itself_is_left_to_the_caller(self, memory: MemoryObjects) -> None:
        faulty = FaultyObjects(memory)
        faulty.inject(Fault.LOST_RESPONSE, method="put")
        objects = RetryingObjects(faulty, clock=ManualClock())
        with pytest.raises(AlreadyExistsError):
            objects.put("a", [b"mine"], mode=CREATE)
        assert objects.read("a", 10)[0] == b"mine"
