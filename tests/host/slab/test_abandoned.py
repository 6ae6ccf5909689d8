"""Folders of segments that no process uses."""

import contextlib
import gc
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tierfs.clock import SystemClock
from tierfs.host.host import Host
from tierfs.host.slab.abandoned import UnusedFolder, remove_gone, unused_folders
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.table.table import SlotKind

STORE = "0123456789abcdef0123456789abcdef"
MIB = 1 << 20
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def shm(tmp_path):
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def own(tmp_path, shm):
    """The folder of the process that looks for abandoned ones."""
    host = Host(tmp_path / "own", shm)
    yield host.segments
    del host


def leave(directory, shm):
    """Stage a chunk in a process with its own folder, and kill the process. Return the folder."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            tier = RamTier(
                Host(directory, shm), STORE, budget_bytes=8 * MIB, clock=SystemClock(), segment_bytes_max=MIB
            )
            slot = tier.take(SlotKind.CHUNK, 100, timeout_s=0)
            slot.segment.seal(slot, b"a", b"", stamp_ns=1)
            os.write(writing, str(tier.host.segments).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writing)
    folder = Path(os.read(reading, 4096).decode())
    os.close(reading)
    assert list(folder.glob("*.slab"))
    return folder


@pytest.mark.parametrize("what", ["the directory", "all above it"])
def test_a_folder_whose_state_directory_was_removed_is_removed(tmp_path, shm, own, what, caplog):
    directory = tmp_path / "test-1" / "state"
    directory.parent.mkdir()
    caplog.set_level("INFO", "tierfs.local")
    folder = leave(directory, shm)
    shutil.rmtree(directory if what == "the directory" else directory.parent)
    remove_gone(own)
    assert not folder.exists()
    assert f"{folder} was removed" in caplog.text
    assert own.exists()


def test_the_next_process_that_opens_a_tier_does_it(tmp_path, shm, own):
    folder = leave(tmp_path / "state", shm)
    shutil.rmtree(tmp_path / "state")
    RamTier(Host(tmp_path / "own", shm), STORE, budget_bytes=8 * MIB, clock=SystemClock()).close()
    assert not folder.exists()


def test_a_folder_whose_state_directory_is_there_stays_and_is_listed(tmp_path, shm, own):
    folder = leave(tmp_path / "state", shm)
    remove_gone(own)
    (found,) = unused_folders(own)
    assert found == UnusedFolder(str(folder), found.bytes, str(tmp_path / "state"))
    assert found.bytes >= MIB


def test_a_folder_that_a_live_process_holds_stays(tmp_path, shm, own):
    host = Host(tmp_path / "state", shm)
    shutil.rmtree(tmp_path / "state")
    remove_gone(own)
    assert host.segments.exists()
    assert not unused_folders(own)
    folder = host.segments
    del host
    gc.collect()
    remove_gone(own)
    assert not folder.exists()


@AS_ROOT
def test_a_folder_of_another_user_is_neither_listed_nor_removed(tmp_path, shm, own):
    folder = leave(tmp_path / "state", shm)
    shutil.rmtree(tmp_path / "state")
    os.chown(folder, 65534, 65534)
    other = leave(tmp_path / "theirs", shm)
    shutil.rmtree(tmp_path / "theirs")
    other = other.rename(other.with_name(f"tierfs-65534-{'0' * 16}"))
    remove_gone(own)
    assert folder.exists()
    assert other.exists()
    assert not unused_folders(own)


@pytest.mark.parametrize("what", ["empty mount point", "removed mount point", "another container", "no state", "text"])
def test_where_it_is_not_certain_that_the_state_directory_is_gone_the_folder_stays(tmp_path, shm, own, what):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    folder = leave(mounted / "state", shm)
    mounted.rename(tmp_path / "away")
    said = json.loads((folder / "state").read_text())
    match what:
        case "empty mount point":
            mounted.mkdir()  # another directory with that name
        case "removed mount point":
            said["is"] = "1:2"  # the recorded filesystem is not the one of the parent directory
        case "another container":
            said["host"] = "another"
    (folder / "state").write_text(json.dumps(said))
    if what == "text":
        (folder / "state").write_text("1:2\n")
    if what == "no state":
        (folder / "state").unlink()
    remove_gone(own)
    assert list(folder.glob("*.slab"))
    if what not in {"no state", "text"}:
        assert unused_folders(own)[0].state_directory == str(mounted / "state")


def test_a_folder_that_is_removed_while_a_process_takes_it_is_made_anew(tmp_path, shm, own, monkeypatch):
    folder = leave(tmp_path / "state", shm)
    opened, removed = os.open, []

    def remove_after(path, flags, *mode):
        fd = opened(path, flags, *mode)
        if Path(path) == folder / "state" and flags & os.O_CREAT and not removed:
            removed.append(folder.rename(tmp_path / "gone"))
            (tmp_path / "gone" / "state").unlink()
        return fd

    shutil.rmtree(tmp_path / "state")
    monkeypatch.setattr("os.open", remove_after)
    host = Host(tmp_path / "state", shm)
    assert removed
    assert host.segments == folder
    assert (folder / "state").exists()
