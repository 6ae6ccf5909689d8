"""`torch_checkpointing` keeps its checkpoints in a store: every storage operation that it uses, and its manager."""

import gc
import io
import pickle
from pathlib import Path

import fsspec
import pytest
import torch
from test_writer import noise, same

pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed")

from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.base_storage import ReadArgs

import tierfs
from tierfs.errors import CapacityError, ConflictError, InvalidInputError
from tierfs.experimental.torchcheckpointing import TierStorageConfig
from tierfs.store.write.sink import SlabSink

OPTIONS = {"ram": "256MiB", "nvme": "0"}


@pytest.fixture
def root(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return Path(f"tierfs::file://{tmp_path}/store")


@pytest.fixture
def storage():
    return pickle.loads(pickle.dumps(TierStorageConfig(OPTIONS))).create_storage()


def tree(storage, path):
    """Return a directory as a dict: the bytes of each file, and a dict for each directory in it."""
    found = {}
    for name in storage.ls(path):
        if storage.isdir(path / name):
            found[name] = tree(storage, path / name)
        else:
            found[name] = storage.read(path / name)
    return found


def test_a_written_checkpoint_is_read_back(root, storage):
    content = noise(300_000, dtype=torch.uint8).numpy().tobytes()
    storage.mkdir(root / "run/a")
    storage.write(root / "run/a/one", content)
    with storage.stream_write(root / "run/a/two") as stream:
        stream.write(memoryview(content)[:1000])
        assert not storage.exists(root / "run/a/two")
        stream.write(content[1000:])
    for name in ("one", "two"):
        path = root / "run/a" / name
        assert storage.read(path) == content
        assert storage.getsize(path) == len(content)
        assert storage.exists(path)
        assert not storage.isdir(path)
        with storage.stream_read(path, ReadArgs(pre_read_full_file=False, known_size_bytes=len(content))) as stream:
            assert stream.seek(-10, io.SEEK_END) == len(content) - 10
            assert stream.read() == content[-10:]
            with pytest.raises(OSError, match="before the start"):
                stream.seek(-len(content) - 1, io.SEEK_END)
            assert stream.seek(7) == 7
            target = bytearray(100)
            assert stream.readinto(target) == 100
            assert target == content[7:107]
    assert storage.ls(root / "run/a") == ["one", "two"]
    assert storage.glob(f"{root}/run/a/t*") == [f"{root}/run/a/two"]
    assert storage.remap_path(root / "run") == str(root).replace("file:/", "file:///") + "/run"
    storage.delete(root / "run/a/one")
    assert storage.ls(root / "run/a") == ["two"]


def test_a_stream_that_is_broken_off_or_forgotten_leaves_what_was_there(root, storage):
    storage.write(root / "a", b"before")
    with pytest.raises(ValueError, match="broken off"), storage.stream_write(root / "a") as stream:
        stream.write(b"half")
        raise ValueError("broken off")
    stream = storage.stream_write(root / "a")
    stream.write(b"half")
    del stream
    gc.collect()
    assert storage.read(root / "a") == b"before"


def test_an_error_of_the_store_is_not_covered_by_torchs(root, monkeypatch):
    def full(*_):
        raise CapacityError("full")

    storage = TierStorageConfig(OPTIONS | {"ack": "staged"}).create_storage()
    monkeypatch.setattr(SlabSink, "write", full)
    with pytest.raises(CapacityError), storage.get_write_stream(root / "a", None) as stream:
        torch.save(noise(5 << 20), stream)
    assert not storage.exists(root / "a")


def test_a_missing_checkpoint_is_named(root, storage):
    for ask in (storage.read, storage.getsize, storage.delete, storage.ls, storage.rmdir):
        with pytest.raises(FileNotFoundError):
            ask(root / "nothing")
    with pytest.raises(FileNotFoundError):
        storage.rename(root / "nothing", root / "other")
    with pytest.raises(FileNotFoundError):
        storage.mkdir(root / "nothing/inner", recursive=False)
    assert not storage.exists(root / "nothing")
    assert not storage.isdir(root / "nothing")
    assert storage.glob(f"{root}/nothing/*") == []
    storage.write(root / "a", b"abc")
    with pytest.raises(ConflictError, match="has 3 bytes, not 4"):
        storage.stream_read(root / "a", ReadArgs(known_size_bytes=4))


def test_directories_are_made_and_removed_with_all_in_them(root, storage):
    storage.mkdir(root / "run/empty")
    storage.mkdir(root / "run/empty")
    with pytest.raises(FileExistsError):
        storage.mkdir(root / "run/empty", recursive=False)
    assert storage.isdir(root / "run/empty")
    storage.write(root / "run/deep/er/a", b"a")
    storage.write(root / "run/metadata.pkl", b"m")
    storage.rmdir(root / "run")
    assert not storage.exists(root / "run")
    assert storage.ls(root) == []


@pytest.mark.parametrize("there", ["nothing", "empty"])
def test_a_directory_is_renamed_to_a_free_place(root, storage, there):
    storage.mkdir(root / ".tmp_step/empty")
    for name in ("a", "inner/b", "metadata.pkl"):
        storage.write(root / ".tmp_step" / name, name.encode())
    before = tree(storage, root / ".tmp_step")
    if there == "empty":
        storage.mkdir(root / "step")
    storage.rename(root / ".tmp_step", root / "step", is_directory=True)
    assert tree(storage, root / "step") == before
    assert before == {"a": b"a", "empty": {}, "inner": {"b": b"inner/b"}, "metadata.pkl": b"metadata.pkl"}
    assert storage.ls(root) == ["step"]


def test_the_metadata_of_a_directory_is_renamed_last(root, storage, monkeypatch):
    from tierfs.experimental import torchcheckpointing

    for name in ("a", "metadata.pkl", "z"):
        storage.write(root / ".tmp_step" / name, name.encode())
    renamed = []

    def rename(store, source, target):
        if source.endswith("z"):
            raise OSError("the host dies here")
        renamed.append(source)
        original(store, source, target)

    original = torchcheckpointing.rename
    monkeypatch.setattr(torchcheckpointing, "rename", rename)
    with pytest.raises(OSError, match="the host dies here"):
        storage.rename(root / ".tmp_step", root / "step", is_directory=True)
    assert renamed == [".tmp_step/a"]
    assert storage.ls(root / "step") == ["a"]
    assert storage.ls(root / ".tmp_step") == ["metadata.pkl", "z"]


@pytest.mark.parametrize("target", ["step", "step/inner", "step/other/deep"])
def test_a_directory_is_not_moved_into_itself(root, storage, target):
    storage.write(root / "step/inner/a", b"a")
    storage.mkdir(root / "empty/inner")
    before = tree(storage, root)
    with pytest.raises(InvalidInputError, match="into itself"):
        storage.rename(root / "step", root / target, is_directory=True)
    with pytest.raises(InvalidInputError, match="into itself"):
        storage.rename(root / "empty", root / "empty/inner", is_directory=True)
    with pytest.raises(InvalidInputError, match="into itself"):
        storage.rename(root, root / "new", is_directory=True)
    assert tree(storage, root) == before


def test_an_existing_checkpoint_is_neither_replaced_nor_joined(root, storage):
    storage.write(root / "directory/a", b"a")
    storage.write(root / "other/b", b"b")
    storage.mkdir(root / "empty")
    storage.write(root / "file", b"f")
    before = tree(storage, root)
    for source, target in (
        ("directory", "other"),
        ("directory", "file"),
        ("file", "directory"),
        ("file", "empty"),
    ):
        with pytest.raises(OSError, match="is not renamed to it"):
            storage.rename(root / source, root / target, is_directory=source == "directory")
        assert tree(storage, root) == before
    storage.write(root / "new", b"n")
    storage.rename(root / "new", root / "file")
    assert storage.read(root / "file") == b"n"
    assert not storage.exists(root / "new")


def test_a_rename_stays_in_its_store(root, storage, tmp_path):
    tierfs.init(f"file://{tmp_path}/other")
    storage.write(root / "a", b"a")
    with pytest.raises(InvalidInputError, match="different stores"):
        storage.rename(root / "a", Path(f"tierfs::file://{tmp_path}/other/a"))


def manager(**items):
    return CheckpointManager.Config(
        items=items, save=SyncCheckpointSaverConfig(), storage_config=TierStorageConfig(OPTIONS)
    ).build()


def state(seed):
    return {
        "model": {"weight": noise(300, 20, seed=seed), "bias": noise(9, dtype=torch.bfloat16, seed=seed)},
        "optimizer": {"moment": noise(300, 20, seed=seed + 1), "step": seed},
        "step": seed,
    }


@pytest.mark.parametrize("resharder", [None, DefaultResharder()], ids=["as it was", "resharded"])
def test_its_manager_saves_and_loads_by_url(root, storage, resharder):
    kept = manager(model=ItemSpec(resharder=resharder))
    url = f"{root}".replace("file:/", "file:///")
    for seed in (1, 2):
        kept.save(f"{url}/step-{seed}", state(seed))
    for seed in (1, 2):
        found = kept.load(f"{url}/step-{seed}", into=state(0))
        assert same(found, state(seed))
    kept.close()
    assert sorted(storage.ls(root)) == ["step-1", "step-2"]
    assert ("metadata.pkl" in storage.ls(root / "step-1")) is (resharder is not None)
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    fs.wait(path, "object")
