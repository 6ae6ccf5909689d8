"""fsspec's own conformance suite: all 137 tests, for a store in memory and one in a directory."""

import uuid

import pytest
from fsspec.tests import abstract

import tierfs


class Memory(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self):
        self.root = f"/bucket-{uuid.uuid4().hex}"
        tierfs.init(f"memory:/{self.root}")
        return tierfs.TierFileSystem(target_protocol="memory")

    @pytest.fixture
    def fs_path(self, fs):
        return f"{self.root}/run"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)


class Directory(Memory):
    @pytest.fixture
    def fs(self, scratch):
        self.root = f"{scratch}/store"
        tierfs.init(f"file://{self.root}")
        return tierfs.TierFileSystem(target_protocol="file")


class TestMemoryCopy(abstract.AbstractCopyTests, Memory):
    pass


class TestMemoryGet(abstract.AbstractGetTests, Memory):
    pass


class TestMemoryPut(abstract.AbstractPutTests, Memory):
    pass


class TestMemoryOpen(abstract.AbstractOpenTests, Memory):
    pass


class TestMemoryPipe(abstract.AbstractPipeTests, Memory):
    pass


class TestDirectoryCopy(abstract.AbstractCopyTests, Directory):
    pass


class TestDirectoryGet(abstract.AbstractGetTests, Directory):
    pass


class TestDirectoryPut(abstract.AbstractPutTests, Directory):
    pass


class TestDirectoryOpen(abstract.AbstractOpenTests, Directory):
    pass


class TestDirectoryPipe(abstract.AbstractPipeTests, Directory):
    pass
