"""Segments that cannot be opened for lack of descriptors or memory, or that another process removed."""

import contextlib
import errno
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.forked import in_child
from support.tiered import BIG, MIB, Gate, Host, content, save_at
from support.waiting import HANG_S, until

from tierfs.errors import CorruptionError, StoreError
from tierfs.flusher.nvme import NvmePersister
from tierfs.host.pending.levels import Level
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.table import SlotState
from tierfs.session import open_store, parse_url
from tierfs.session.settings import TierOptions
from tierfs.store import Store, copy, kind_of, level_of, list_directory, load, save, stat_to_read, status, wait
from tierfs.store.write.in_place import StagedFile

FILES = 3


@contextlib.contextmanager
def out_of(error, refused, monkeypatch):
    """Let the opening of one segment fail with this error."""
    attach = Segment.attach.__func__

    def refuse(cls, path):
        if path.name == refused:
            raise error
        return attach(cls, path)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "attach", classmethod(refuse))
        yield


@pytest.fixture
def quick(monkeypatch):
    """The flusher sweeps often, and soon stops trying to open a segment."""
    monkeypatch.setattr("tierfs.flusher.flusher.SWEEP_S", 0.1)
    monkeypatch.setattr("tierfs.flusher.flusher.SEE_S_MAX", 0.3)


@pytest.fixture
def left(tmp_path, root, descriptor):
    """Files that a dead process saved as ``staged`` in two segments while the object tier was unreachable."""
    files = {f"f{number}": content(17 * MIB) for number in range(FILES)}

    def leave():
        host = Host(tmp_path, Gate(root), descriptor, ram=96 * MIB, nvme=0)
        host.objects.down = True
        for path, data in files.items():
            save(host.store, path, data)
        names = [segment.path.name for segment in host.tiers.ram.own_segments()]
        (tmp_path / "names").write_text("\n".join(names))
        (tmp_path / "folder").write_text(str(host.tiers.ram.host.segments))
        assert len(names) > 1

    assert in_child(leave) == 0
    return files, (tmp_path / "names").read_text().split()


@pytest.mark.parametrize(
    ("which", "error"),
    [(0, OSError(errno.EMFILE, "no descriptors")), (1, MemoryError()), (1, OSError(errno.ENOMEM, ""))],
)
def test_an_unopenable_segment_loses_nothing(left, make_host, monkeypatch, which, error):
    files, names = left
    with out_of(error, names[which], monkeypatch):
        host = make_host(ram=96 * MIB, nvme=0)
        host.tiers.writer.announce()
        with pytest.raises(TimeoutError, match="cannot be opened"):
            wait(host.store, "", Level.OBJECT, 0.5)
        assert status(host.store)["unread_segments"] == 1
    wait(host.store, "", Level.OBJECT)
    assert {path: load(host.plain(), path) for path in files} == files
    assert status(host.store)["unread_segments"] == 0


@pytest.mark.parametrize("at", [0, 24], ids=["no segment", "damaged"])
def test_files_in_a_damaged_segment_are_not_called_safe(left, make_host, tmp_path, at, caplog):
    files, names = left
    damaged = Path((tmp_path / "folder").read_text()) / names[0]
    with damaged.open("r+b") as file:
        head = file.read(at + 1)
        file.seek(at)
        file.write(bytes([head[at] ^ 0x40]))
    host = make_host(ram=96 * MIB, nvme=0)
    host.tiers.writer.announce()
    for _ in range(2):
        with pytest.raises(CorruptionError, match=rf"{names[0]} is no longer a valid segment.*delete that file"):
            wait(host.store, "", Level.OBJECT)
    assert status(host.store)["unread_segments"] == 1
    save(host.store, "g", b"new")
    damaged.unlink()
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "g") == b"new"
    there = [path for path in files if kind_of(host.plain(), path) is not None]
    assert len(there) < len(files)
    assert all(load(host.plain(), path) == files[path] for path in there)
    assert status(host.store)["unread_segments"] == 0
    assert caplog.text.count("cannot be used and is ignored") == 1, (
        "the flusher and the rest of this process say it once"
    )


@pytest.fixture
def flushing(make_host):
    """A host whose flusher scans segments by itself, as in another process, and one file in the object tier."""
    host = make_host(nvme=0)
    save(host.store, "before", content(MIB))
    wait(host.store, "", Level.OBJECT)
    return host


@pytest.mark.parametrize("what", ["folder", "files"])
def test_files_in_a_removed_segment_are_flushed(flushing, what, caplog):
    folder = flushing.tiers.ram.host.segments
    if what == "folder":
        shutil.rmtree(folder)
    else:
        for path in folder.glob("*.slab"):
            path.unlink()
    files = {f"after-{number}": content(MIB) for number in range(3)}
    for path, data in files.items():
        save(flushing.store, path, data)
    wait(flushing.store, "", Level.OBJECT)
    assert {path: load(flushing.plain(), path) for path in files} == files
    assert all(not segment.is_removed() for segment in flushing.tiers.ram.own_segments())
    assert [record.levelno for record in caplog.records if "was removed while in use" in record.message] == [
        logging.WARNING
    ]


def test_a_file_whose_memory_was_removed_meanwhile_is_not_said_to_be_saved(flushing):
    staged = StagedFile(flushing.store)
    runs = staged.add_runs([[MIB]])
    runs[0].view[:] = content(MIB)
    staged.seal(runs)
    shutil.rmtree(flushing.tiers.ram.host.segments)
    with pytest.raises(StoreError, match=r"a: the shared memory that it was staged in was removed.*write it again"):
        staged.commit("a", runs)
    staged.abort()
    assert kind_of(flushing.store, "a") is None


def test_a_draft_that_was_removed_before_the_flusher_saw_it_is_not_waited_for(flushing, monkeypatch):
    monkeypatch.setattr(flushing.flusher.ram, "segments", list)
    save(flushing.store, "a", content(MIB))
    for segment in flushing.tiers.ram.own_segments():
        segment.unlink()
    with pytest.raises(StoreError, match=r"a: the shared memory .* was removed before the flusher saw it"):
        wait(flushing.store, "a", Level.OBJECT, None)


def test_new_segments_are_made_after_the_folder_was_removed(flushing):
    shutil.rmtree(flushing.tiers.ram.host.segments)
    files = {f"after-{number}": content(BIG) for number in range(2)}
    for path, data in files.items():
        save(flushing.store, path, data)
    assert len(flushing.tiers.ram.own_segments()) > 1
    wait(flushing.store, "", Level.OBJECT)
    assert {path: load(flushing.plain(), path) for path in files} == files


@pytest.mark.usefixtures("quick")
def test_open_segments_of_a_dead_process_outlive_their_files(left, make_host):
    files, _ = left
    host = make_host(ram=96 * MIB, nvme=0)
    with host.held():
        host.tiers.writer.announce()
        until(lambda: status(host.store)["queue_files"] == len(files))
        for path in host.tiers.ram.host.segments.glob("*.slab"):
            path.unlink()
        time.sleep(0.5)  # time for the flusher to look again
    host.flusher.wait("", Level.OBJECT)
    assert {path: load(host.plain(), path) for path in files} == files


@pytest.fixture
def overflown(tmp_path, root, descriptor):
    """A dead process's file larger than the ram tier: most of it is on the disk, its draft in a segment in memory."""
    data = content(2 * BIG)

    def leave():
        NvmePersister.persist_all = lambda *_, **__: None  # no further than a writer waits for
        host = Host(tmp_path, Gate(root), descriptor, ram=48 * MIB, nvme=128 * MIB)
        host.objects.down = True
        save(host.store, "f", data)
        (draft,) = host.tiers.ram.drafts((SlotState.SEALED,))
        (tmp_path / "name").write_text(draft.segment.path.name)

    assert in_child(leave) == 0
    return data, (tmp_path / "name").read_text()


@pytest.mark.usefixtures("quick")
def test_chunks_on_the_disk_stay_while_a_draft_is_unreadable(overflown, make_host, monkeypatch):
    data, name = overflown
    with out_of(MemoryError(), name, monkeypatch):
        # Room for a segment beside the dead process's one, which holds its draft.
        host = make_host(ram=80 * MIB, nvme=128 * MIB)
        host.tiers.writer.announce()
        until(lambda: status(host.store)["unread_segments"] == 1)
        with pytest.raises(StoreError, match="cannot be opened, and may hold the awaited change"):
            wait(host.store, "", Level.OBJECT)
        time.sleep(0.5)  # time for the flusher to sweep
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "f") == data


@pytest.mark.usefixtures("quick")
def test_a_flusher_that_cannot_see_all_says_so_in_the_end(left, make_host, monkeypatch):
    _, names = left
    with out_of(OSError(errno.ENOMEM, "no memory"), names[0], monkeypatch):
        host = make_host(ram=96 * MIB, nvme=0)
        host.tiers.writer.announce()
        with pytest.raises(StoreError, match="cannot be opened, and may hold the awaited change"):
            wait(host.store, "", Level.OBJECT)


def test_a_wait_does_not_end_before_the_flusher_knows_what_is_pending(flushing, monkeypatch):
    asked = []

    def answer(do, arguments, **_):
        asked.append(do)
        return {}

    with flushing.held():
        save(flushing.store, "a", content(MIB))
        monkeypatch.setattr(flushing.tiers.flusher, "request", answer)
        with pytest.raises(TimeoutError, match="a has not reached 'object' yet, and the flusher does not know of it"):
            flushing.tiers.wait("", Level.OBJECT, 0.3)
        assert asked.count("wait") > 1
        monkeypatch.undo()
    wait(flushing.store, "", Level.OBJECT)


def test_each_of_two_users_of_a_store_waits_for_room_as_long_as_it_was_told(tmp_path):
    location = replace(parse_url(f"file://{tmp_path}/store/run"), root=f"{tmp_path}/store")
    options = TierOptions(ram=64 * MIB, nvme=64 * MIB, state_dir=str(tmp_path / "state"), ack="staged")
    stores = [
        open_store(replace(location, tiers=replace(options, timeout=timeout)), write=True, create=True)[0]
        for timeout in (HANG_S, 0.2)
    ]
    assert stores[0].tiers is stores[1].tiers
    begin = time.monotonic()
    staged = StagedFile(stores[1])
    while not stores[1].tiers.counters["overflow"]:
        staged.add_runs([[MIB]])
    assert time.monotonic() - begin < HANG_S / 2
    staged.abort()
    stores[0].tiers.close()


@pytest.mark.parametrize("size", [0, 100, 5000, MIB])
def test_a_file_in_a_segment_that_was_cut_short_is_damaged_and_not_missing(left, tmp_path, objects, make_host, size):
    files, names = left
    save(Store(objects, make_host("elsewhere").descriptor, url="memory://store"), "run/published", b"published")
    for name in names:
        os.truncate(Path((tmp_path / "folder").read_text()) / name, size)
    store = make_host(ram=96 * MIB, nvme=0).store
    lost = min(files)
    for read in (
        lambda: load(store, lost),
        lambda: stat_to_read(store, lost),
        lambda: copy(store, lost, "copy"),
        lambda: level_of(store, lost),
        lambda: list_directory(store, "unseen"),
        lambda: wait(store, lost, Level.OBJECT),
    ):
        with pytest.raises(CorruptionError, match=r"is no longer a valid segment.*delete that file.*save again"):
            read()
    assert load(store, "run/published") == b"published"
    assert kind_of(store, lost) is None
    save_at(store, lost, b"again", Level.OBJECT)
    assert load(store, lost) == b"again"
