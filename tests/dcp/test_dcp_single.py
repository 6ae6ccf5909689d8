"""Stock DCP by URL in one process without a process group: saves, loads and failures."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from support.opened import descriptors
from support.waiting import HANG_S

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.dcp_ranks import NUMBERS, Unsavable, fingerprint, refuse_sync
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierfs
from tierfs.dcp import TierWriter
from tierfs.errors import ConflictError, CorruptionError, InvalidInputError, StoreError, StoreNotFoundError
from tierfs.fs import TierFileSystem
from tierfs.objects import LocalObjects
from tierfs.testing import flip_bit

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Make ``os.sync`` raise: DCP passes the error on, so every test here shows that DCP does not call it."""
    monkeypatch.setattr(os, "sync", refuse_sync)


@pytest.fixture
def root(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"


@pytest.fixture
def objects(root, tmp_path):
    return LocalObjects(tmp_path / "store")


@pytest.fixture(params=["file", "memory"])
def any_root(request, tmp_path):
    if request.param == "file":
        url = f"file://{tmp_path}/any"
    else:
        url = f"memory://dcp-{uuid.uuid4().hex}"
    tierfs.init(url)
    return f"tierfs::{url}"


def state_of(seed, numbers=1000):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(numbers, generator=generator), "bias": torch.randn(10, generator=generator)},
        "step": seed,
        "names": ["a", "b"],
    }


def like(state):
    """Return a state of the same structure, with every value cleared."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [like(value) for value in state]
    return type(state)()


def load(url, state, **options):
    loaded = like(state)
    dcp.load(loaded, checkpoint_id=url, **options)
    return loaded


def assert_holds(url, state):
    assert fingerprint(load(url, state)) == fingerprint(state)


def broken_in_the_middle(state):
    """Return a state whose save writes whole chunks of the data file, then raises. DCP writes in the state's order."""
    broken = {"a": torch.zeros(2 * NUMBERS), "b": torch.zeros(2 * NUMBERS), **state}
    broken["z"] = torch.ones(10).as_subclass(Unsavable)
    return broken


def failure_of(call):
    with pytest.raises(CheckpointException) as caught:
        call()
    assert list(caught.value.failures) == [0]
    error = caught.value.failures[0][0]
    # On Python 3.13, torch's C++ reader calls back once more after an error, and that call fails with a SystemError.
    return error.__cause__ if isinstance(error, SystemError) else error


def metadata_failure_of(call):
    """Return the message for a ``.metadata`` that cannot be read. Skip the test if an older torch hides the message."""
    message = str(failure_of(call))
    if message == "metadata is None":
        pytest.skip("this torch fails, as it must, but does not pass on why .metadata could not be read")
    return message


def chunk_keys(objects):
    return {info.key: info.size for info in objects.list(".tierfs/chunks/")}


# -- loading ---------------------------------------------------------------------------------------------------------


def test_tensors_and_plain_values_come_back(any_root):
    state = state_of(1)
    dcp.save(state, checkpoint_id=f"{any_root}/run/step_1")
    assert_holds(f"{any_root}/run/step_1", state)


def test_destinations_that_are_not_contiguous_are_filled(root):
    state = {"weight": torch.arange(24.0).reshape(4, 6)}
    dcp.save(state, checkpoint_id=f"{root}/ck")
    holder = torch.zeros(12, 8)
    loaded = {"weight": holder[::2, ::2].T}
    assert loaded["weight"].shape == (4, 6)
    dcp.load(loaded, checkpoint_id=f"{root}/ck")
    assert torch.equal(holder[::2, ::2].T, state["weight"])
    assert not holder[1::2].any()


def test_tensors_that_span_chunks_come_back(root):
    state = {
        "random": torch.randn(3 * NUMBERS + 7),
        "zeros": torch.zeros(2 * NUMBERS),
        "small": torch.ones(3),
    }
    dcp.save(state, checkpoint_id=f"{root}/ck")
    fs, path = fsspec.url_to_fs(f"{root}/ck")
    assert fs.info(f"{path}/__0_0.distcp")["chunks"] >= 4
    assert_holds(f"{root}/ck", state)


def test_several_files_written_by_several_threads_come_back(root):
    state = {f"w{index}": torch.full((1000,), float(index)) for index in range(9)}
    writer = FsspecWriter(f"{root}/ck", single_file_per_rank=False, thread_count=3)
    dcp.save(state, storage_writer=writer)
    fs, path = fsspec.url_to_fs(f"{root}/ck")
    assert len(fs.ls(path, detail=False)) == 10
    assert_holds(f"{root}/ck", state)


def test_a_state_that_did_not_change_is_stored_once(root, objects):
    state = state_of(1, numbers=2 * NUMBERS)
    dcp.save(state, checkpoint_id=f"{root}/step_1")
    before = chunk_keys(objects)
    dcp.save(state, checkpoint_id=f"{root}/step_2")
    assert chunk_keys(objects) == before
    assert_holds(f"{root}/step_2", state)


def test_a_background_save_keeps_the_state_as_it_was_when_it_was_asked_for(any_root):
    state = state_of(1)
    expected = fingerprint(state)
    future = dcp.async_save(state, checkpoint_id=f"{any_root}/ck")
    state["model"]["weight"].zero_()
    future.result()
    assert fingerprint(load(f"{any_root}/ck", state)) == expected


def test_only_what_is_asked_for_is_loaded(root):
    state = state_of(1)
    dcp.save(state, checkpoint_id=f"{root}/ck")
    part = _load_state_dict_from_keys({"model.bias"}, storage_reader=FsspecReader(f"{root}/ck"))
    assert fingerprint(part) == fingerprint({"model": {"bias": state["model"]["bias"]}})
    everything = _load_state_dict_from_keys(checkpoint_id=f"{root}/ck")
    assert fingerprint(everything) == fingerprint(state)


def test_a_named_store_is_found_by_its_configuration(tmp_path, monkeypatch):
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.prod]\nurl = "file://{tmp_path}/prod/runs"\ncreate = true\n')
    monkeypatch.setenv("TIERFS_CONFIG", str(config))
    state = state_of(1)
    dcp.save(state, checkpoint_id="tierfs://prod/ck")
    assert_holds("tierfs://prod/ck", state)
    assert_holds(f"tierfs::file://{tmp_path}/prod/runs/ck", state)


def test_a_whole_object_goes_through_torch_save_and_load(any_root):
    state = state_of(1, numbers=NUMBERS)
    with fsspec.open(f"{any_root}/whole.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"{any_root}/whole.pt", "rb") as file:
        loaded = torch.load(file, weights_only=True)
    assert fingerprint(loaded) == fingerprint(state)


def test_a_whole_object_goes_through_torch_in_its_old_format(any_root):
    state = {"weight": torch.arange(300_000.0), "twice": [torch.ones(3, dtype=torch.bfloat16)], "step": 3}
    fs, path = fsspec.url_to_fs(f"{any_root}/old.pt")
    with fs.open(path, "wb") as file:
        torch.save(state, file, _use_new_zipfile_serialization=False)
    with fs.open(path) as file:
        found = torch.load(file)
    assert torch.equal(found["weight"], state["weight"])
    assert torch.equal(found["twice"][0], state["twice"][0])
    assert found["step"] == 3


# -- saving to the same id again -------------------------------------------------------------------------------------


def test_saving_to_the_same_id_again_replaces_it(any_root):
    dcp.save(state_of(1), checkpoint_id=f"{any_root}/ck")
    dcp.save(state_of(2, numbers=2000), checkpoint_id=f"{any_root}/ck")
    assert_holds(f"{any_root}/ck", state_of(2, numbers=2000))


def test_a_writer_told_not_to_overwrite_refuses(root):
    dcp.save(state_of(1), checkpoint_id=f"{root}/ck")
    error = failure_of(lambda: dcp.save(state_of(2), storage_writer=FsspecWriter(f"{root}/ck", overwrite=False)))
    assert "already exists" in str(error)
    assert_holds(f"{root}/ck", state_of(1))


def test_a_save_that_dies_before_the_rename_is_finished_by_renaming(root, monkeypatch):
    url = f"{root}/ck"
    dcp.save(state_of(1), checkpoint_id=url)

    def die(fs, source, target, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TierFileSystem, "mv", die)
        failure_of(lambda: dcp.save(state_of(2), checkpoint_id=url))
    fs, path = fsspec.url_to_fs(url)
    assert not fs.exists(f"{path}/.metadata")
    fs.mv(f"{path}/.metadata.tmp", f"{path}/.metadata")
    assert_holds(url, state_of(2))


def test_the_rename_of_the_metadata_is_one_manifest(root, objects, monkeypatch):
    url = f"{root}/ck"
    dcp.save(state_of(1), checkpoint_id=url)
    fs, path = fsspec.url_to_fs(url)
    fs.cp_file(f"{path}/.metadata", f"{path}/.metadata.tmp")
    chunks = chunk_keys(objects)
    published = []
    staging = sys.modules["tierfs.store.write.staging"]
    publish = staging.publish
    monkeypatch.setattr(staging, "publish", lambda *args, **options: published.append(publish(*args, **options)))
    fs.rename(f"{url}/.metadata.tmp", f"{url}/.metadata")
    assert [record.path for record in published] == ["ck/.metadata", "ck/.metadata.tmp"]  # and a tombstone
    assert chunk_keys(objects) == chunks
    assert_holds(url, state_of(1))


def test_a_rename_over_the_metadata_shows_the_old_one_or_the_new_one_at_every_moment(root):
    fs, path = fsspec.url_to_fs(root)
    contents = {b"old" * 1000, b"new" * 1000}
    seen = []
    done = threading.Event()

    def read():
        while not done.is_set():
            seen.append(fs.cat_file(f"{path}/.metadata"))

    fs.pipe_file(f"{path}/.metadata", b"old" * 1000)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(40):
            fs.pipe_file(f"{path}/.metadata.tmp", (b"new" if turn % 2 else b"old") * 1000)
            fs.rename(f"{path}/.metadata.tmp", f"{path}/.metadata")
    finally:
        done.set()
        reader.join()
    assert len(seen) > 1
    assert set(seen) <= contents


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_in_the_middle_of_a_file_publishes_nothing(any_root):
    error = failure_of(lambda: dcp.save(broken_in_the_middle(state_of(1)), checkpoint_id=f"{any_root}/ck"))
    assert "cannot be serialised" in str(error)
    fs, path = fsspec.url_to_fs(any_root)
    assert fs.find(path) == []


def test_a_save_that_fails_in_the_middle_of_a_file_leaves_the_one_before(any_root):
    url = f"{any_root}/ck"
    dcp.save(state_of(1), checkpoint_id=url)
    failure_of(lambda: dcp.save(broken_in_the_middle(state_of(2)), checkpoint_id=url))
    assert_holds(url, state_of(1))
    dcp.save(state_of(3), checkpoint_id=url)
    assert_holds(url, state_of(3))


def test_a_save_that_cannot_be_published_leaves_the_one_before(root, monkeypatch):
    url = f"{root}/ck"
    dcp.save(state_of(1), checkpoint_id=url)

    def fail(*args, **options):
        raise StoreError("the tier is down", transient=True)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["tierfs.store.write.writer"], "publish", fail)
        assert isinstance(failure_of(lambda: dcp.save(state_of(2), checkpoint_id=url)), StoreError)
    assert_holds(url, state_of(1))


def test_a_save_that_somebody_else_overtook_leaves_theirs(root):
    url = f"{root}/ck"
    fs, path = fsspec.url_to_fs(url)

    class Overtaken(DefaultSavePlanner):
        def resolve_data(self, write_item):
            fs.pipe_file(f"{path}/__0_0.distcp", b"theirs")
            return super().resolve_data(write_item)

    error = failure_of(lambda: dcp.save({"weight": torch.ones(3)}, checkpoint_id=url, planner=Overtaken()))
    assert isinstance(error, ConflictError)
    assert fs.cat_file(f"{path}/__0_0.distcp") == b"theirs"
    assert not fs.exists(f"{path}/.metadata")


def test_a_background_save_that_fails_leaves_the_one_before_and_says_so(root):
    url = f"{root}/ck"
    dcp.save(state_of(1), checkpoint_id=url)
    # Staging copies the tensors into plain ones, so the planner has to fail here.
    future = dcp.async_save(state_of(2), checkpoint_id=url, planner=FailingPlanner())
    assert "no more" in str(failure_of(future.result))
    assert_holds(url, state_of(1))


class FailingPlanner(DefaultSavePlanner):
    """A planner that resolves one tensor, then raises."""

    def __init__(self):
        super().__init__()
        self.resolved = 0

    def resolve_data(self, write_item):
        self.resolved += 1
        if self.resolved > 1:
            raise RuntimeError("no more")
        return super().resolve_data(write_item)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_that_a_thread_of_dcp_failed_to_write_is_missed_at_the_latest_when_loading(root):
    # DCP itself may report such a save as done. The file is missing then, and no partial file exists.
    url = f"{root}/ck"
    state = {f"w{index}": torch.full((1000,), float(index)) for index in range(4)}
    broken = {**state, "w3": state["w3"].as_subclass(Unsavable)}
    try:
        dcp.save(broken, storage_writer=FsspecWriter(url, thread_count=2, single_file_per_rank=False))
    except CheckpointException:
        return
    finally:
        # DCP does not wait for a thread that still writes, but the test removes the directory it writes to.
        for thread in threading.enumerate():
            if "_write_files_from_queue" in thread.name:
                thread.join(HANG_S)
    with pytest.raises(CheckpointException):
        load(url, state)


def test_an_object_that_torch_save_fails_to_write_leaves_the_one_before(any_root):
    with fsspec.open(f"{any_root}/whole.pt", "wb") as file:
        torch.save(state_of(1), file)

    def save_broken():
        with fsspec.open(f"{any_root}/whole.pt", "wb") as file:
            torch.save(broken_in_the_middle(state_of(2)), file)

    with pytest.raises(ValueError, match="cannot be serialised"):
        save_broken()
    with fsspec.open(f"{any_root}/whole.pt", "rb") as file:
        assert fingerprint(torch.load(file, weights_only=True)) == fingerprint(state_of(1))


@pytest.mark.parametrize("content", [torch.randn, torch.zeros], ids=["raw", "compressed"])
def test_a_flipped_bit_on_disk_is_an_error_that_names_the_file_and_the_chunk(root, objects, content):
    state = {"weight": content(2 * NUMBERS)}
    dcp.save(state, checkpoint_id=f"{root}/ck")
    for key, size in chunk_keys(objects).items():
        flip_bit(objects, key, 8 * (size // 2) + 3)
        error = failure_of(lambda: load(f"{root}/ck", state))
        assert isinstance(error, CorruptionError)
        assert "/store/ck/__0_0.distcp" in str(error)
        assert key in str(error)
        flip_bit(objects, key, 8 * (size // 2) + 3)
    assert_holds(f"{root}/ck", state)


def test_a_missing_chunk_is_an_error_that_names_the_file_and_the_chunk(root, objects):
    state = {"weight": torch.randn(2 * NUMBERS)}
    dcp.save(state, checkpoint_id=f"{root}/ck")
    key = min(chunk_keys(objects))
    objects.delete([key])
    error = failure_of(lambda: load(f"{root}/ck", state))
    assert isinstance(error, CorruptionError)
    assert "/store/ck/__0_0.distcp" in str(error)
    assert key in str(error)
    assert "missing" in str(error)


def test_damaged_metadata_is_an_error_that_says_so(root, objects):
    dcp.save(state_of(1), checkpoint_id=f"{root}/ck")
    key = next(info.key for info in objects.list(".tierfs/tree/") if ".metadata!" in info.key)
    flip_bit(objects, key, 8 * (objects.head(key).size // 2))
    assert key in metadata_failure_of(lambda: load(f"{root}/ck", state_of(1)))


def test_missing_metadata_is_an_error_that_names_it(root):
    dcp.save(state_of(1), checkpoint_id=f"{root}/ck")
    fs, path = fsspec.url_to_fs(f"{root}/ck")
    fs.rm_file(f"{path}/.metadata")
    message = metadata_failure_of(lambda: load(f"{root}/ck", state_of(1)))
    assert f"{path}/.metadata is not there" in message


def test_saving_without_a_store_is_an_error_that_says_how_to_make_one(tmp_path):
    error = failure_of(lambda: dcp.save(state_of(1), checkpoint_id=f"tierfs::file://{tmp_path}/nowhere/ck"))
    assert isinstance(error, StoreNotFoundError)
    assert f"tierfs init file://{tmp_path}/nowhere" in str(error)
    assert not (tmp_path / "nowhere").exists()


def test_loading_without_a_store_is_an_error_that_says_how_to_make_one(tmp_path):
    message = metadata_failure_of(lambda: load(f"tierfs::file://{tmp_path}/nowhere/ck", state_of(1)))
    assert f"tierfs init file://{tmp_path}/nowhere" in message


@pytest.mark.parametrize("url", ["tierfs::/abs/ck", "tierfs::rel/ck", "tierfs::"])
def test_a_url_without_a_filesystem_behind_tierfs_is_refused_where_tierfs_sees_it(url):
    # DCP takes these for local paths and does not ask tierfs. A reader or writer object does.
    fs = TierFileSystem(target_protocol="file")
    for method in (fs.exists, fs.makedirs, fs.open, fs.ls, fs.rm):
        with pytest.raises(InvalidInputError, match="write tierfs::file:///absolute/path"):
            method(url)


def test_a_writer_object_for_a_url_without_a_filesystem_is_refused():
    error = failure_of(lambda: dcp.save(state_of(1), storage_writer=FsspecWriter("tierfs::/abs/ck")))
    assert isinstance(error, InvalidInputError)
    assert "write tierfs::file:///absolute/path" in str(error)


def test_no_descriptor_is_left_open(root):
    dcp.save(state_of(1), checkpoint_id=f"{root}/warm")
    before = descriptors()
    for turn in range(3):
        dcp.save(state_of(turn), checkpoint_id=f"{root}/ck-{turn}")
        failure_of(lambda: dcp.save(broken_in_the_middle(state_of(1)), checkpoint_id=f"{root}/broken"))
        load(f"{root}/ck-{turn}", state_of(turn))
    assert descriptors() <= before


# -- deleting after a failed write -----------------------------------------------------------------------------------


def fail():
    raise ValueError("broken")


def write_and_clean_up(fs, path):
    """Delete a file's path while handling the error that ended its write, as DCP and other programs do."""
    with fs.open(path, "wb") as file:
        try:
            file.write(b"half")
            fail()
        except BaseException:
            fs.rm(path)
            raise


@pytest.fixture
def kept(root):
    fs, path = fsspec.url_to_fs(root)
    fs.pipe_file(f"{path}/file", b"before")
    return fs, f"{path}/file"


def test_cleaning_up_after_a_failed_write_keeps_what_was_there(kept):
    fs, path = kept
    with pytest.raises(ValueError, match="broken"):
        write_and_clean_up(fs, path)
    assert fs.cat_file(path) == b"before"


def test_a_deletion_after_the_failed_write_deletes(kept):
    fs, path = kept
    try:
        write_and_clean_up(fs, path)
    except ValueError:
        fs.rm(path)
    assert not fs.exists(path)


def test_a_deletion_while_nothing_failed_deletes(kept):
    fs, path = kept
    with pytest.raises(ConflictError), fs.open(path, "wb") as file:
        file.write(b"half")
        fs.rm(path)
    assert not fs.exists(path)


def test_a_deletion_by_another_thread_that_handles_an_error_deletes(kept):
    fs, path = kept

    def delete():
        try:
            fail()
        except ValueError:
            fs.rm(path)

    with pytest.raises(ConflictError), fs.open(path, "wb") as file:
        file.write(b"half")
        thread = threading.Thread(target=delete)
        thread.start()
        thread.join()
    assert not fs.exists(path)


def test_a_deletion_of_another_file_while_a_write_fails_deletes(kept):
    fs, path = kept
    fs.pipe_file(f"{path}-2", b"other")

    def write():
        with fs.open(path, "wb"):
            try:
                fail()
            except ValueError:
                fs.rm(f"{path}-2")
                raise

    with pytest.raises(ValueError, match="broken"):
        write()
    assert not fs.exists(f"{path}-2")
    assert fs.cat_file(path) == b"before"


@pytest.mark.parametrize("world", [("2", "1"), ("2", None)])
def test_stock_dcp_over_hosts_is_refused_below_object(root, monkeypatch, world):
    ack, step, state = "local", f"{root}/step_1", {"w": torch.arange(9.0)}
    for name, value in zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=FsspecWriter(step, ack=ack, ram="64MiB"), no_dist=True)
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, InvalidInputError)
    assert "TIERFS_DCP=1" in str(error)
    assert "ack='object'" in str(error)
    fs, path = fsspec.url_to_fs(step, ack=ack, ram="64MiB")
    assert fs.find(path) == []
    for name in (".metadata", ".metadata.tmp", "__1.metadata.tmp", "__1_0.distcp"):
        with pytest.raises(InvalidInputError, match="torch's own checkpoint writer"):
            fs.pipe_file(f"{path}/{name}", b"x")
        fs.pipe_file(f"{path}/{name}", b"x", ack="object")
    fs.pipe_file(f"{path}/rank_1.pt", b"torch.save is not covered")
    dcp.save(state, storage_writer=FsspecWriter(step, ack="object", ram="64MiB"), no_dist=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", world[0])
    dcp.save(state, storage_writer=FsspecWriter(step, ack=ack, ram="64MiB"), no_dist=True)


@pytest.mark.parametrize("ram", ["0", "64MiB"])
def test_no_change_returns_before_it_is_local(root, tmp_path, ram):
    options = {"ack": "local", "ram": ram, "nvme": "64MiB", "state_dir": f"{tmp_path}/state"}
    fs, path = fsspec.url_to_fs(root, **options)
    hasty, _ = fsspec.url_to_fs(root, timeout=0.5, **options)
    fs.pipe_file(f"{path}/first", b"starts the flusher")
    fs.wait(path, "local", timeout=HANG_S)
    writer = TierWriter(f"{root}/step_1", timeout=0.5, **options)
    changes = [
        lambda: hasty.pipe_file(f"{path}/piped", bytes(1 << 20)),
        lambda: dcp.save({"w": torch.zeros(1 << 18)}, storage_writer=writer, no_dist=True),
    ]
    flusher = fs.status()["flusher"]["pid"]
    os.kill(flusher, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(changes)) as pool:
            raised = [str(made.exception()) for made in [pool.submit(each) for each in changes]]
    finally:
        os.kill(flusher, signal.SIGCONT)
    assert all("has not reached 'local' yet" in each for each in raised), raised
    fs.wait(path, "local", timeout=HANG_S)
