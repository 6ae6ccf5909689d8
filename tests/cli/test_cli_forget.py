"""``forget``, and the list of this host's stores."""

import os
import shutil
import subprocess
import sys

import fsspec
import pytest
from support.opened import know_no_store

import tierfs
from tierfs.cli import main
from tierfs.errors import StoreError
from tierfs.host.rpc.client import FlusherClient, stop_flusher
from tierfs.session import compose, open_store, parse_url
from tierfs.session import open as opening

PROGRAM = [sys.executable, "-m", "tierfs.cli"]


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    """A host with its own directories and both local tiers. Its flushers are stopped after the test."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setenv("TIERFS_RAM", "64MiB")
    monkeypatch.setenv("TIERFS_NVME", "64MiB")
    know_no_store(monkeypatch)
    (tmp_path / "shm").mkdir()
    yield tmp_path
    close()
    for directory in (tmp_path / "state").glob("stores/*"):
        stop_flusher(directory, tierfs.__version__, timeout_s=30)


def close():
    """Let this process leave all stores, as one that ends does."""
    for tiers in compose.open_tiers.values():
        tiers.close()


def make(tell, root):
    """Make a store with a file in a directory, and save a second file through the local tiers."""
    tell("init", root)
    fs, path = fsspec.url_to_fs(f"tierfs::file://{root}", ack="object", skip_instance_cache=True)
    fs.pipe_file(f"{path}/run/a", os.urandom(1 << 20))
    tell("flusher", "stop", root)
    close()


def kept(host):
    """Return the names of the stores' directories, and of what is being removed, and the number of segments."""
    return (
        len(list((host / "state" / "stores").glob("*"))),
        len(list((host / "state").glob("forgotten-*"))),
        len(list((host / "shm").rglob("*.slab*"))),
    )


def test_leftovers_of_a_gone_store_are_listed_and_removed(host, tell, told):
    make(tell, host / "here")
    make(tell, host / "gone")
    shutil.rmtree(host / "gone")
    shown = tell()
    assert f"{host}/here" in shown
    assert f"{host}/gone" not in shown
    assert "1 more are gone and left" in shown
    assert "`tierfs forget --gone`" in shown
    assert "--yes" in tell("forget", "--gone")
    assert kept(host)[0] == 2
    (one,) = told("forget", "--gone", "--yes")["stores"]
    assert one["place"] == f"{host}/gone"
    assert one["bytes"] > 0
    assert one["problem"] is None
    assert kept(host) == (1, 0, 0)
    assert "nothing to remove" in tell("forget", "--gone", "--yes")
    assert [store["place"] for store in told()["stores"]] == [f"{host}/here"]


def test_the_live_one_of_two_stores_at_a_place_is_listed(host, tell, told):
    for _ in range(2):
        shutil.rmtree(host / "store", ignore_errors=True)
        opening.open_stores.clear()
        make(tell, host / "store")
    assert tell().count(f"{host}/store") == 1
    live = open_store(parse_url(str(host / "store")))[0].descriptor.uuid
    close()
    assert {store["uuid"]: store["is_gone"] for store in told()["stores"]}[live] is False
    tell("forget", "--gone", "--yes")
    assert [store["uuid"] for store in told()["stores"]] == [live]


@pytest.mark.parametrize("form", ["{root}", "tierfs::file://{root}", "file://{root}", "id"])
def test_a_named_store_is_forgotten_and_can_be_opened_again(host, tell, told, form):
    make(tell, host / "store")
    before = (host / "store").rglob("*")
    (uuid,) = (store["uuid"] for store in told()["stores"])
    tell("forget", uuid if form == "id" else form.format(root=host / "store"), "--yes")
    assert kept(host) == (0, 0, 0)
    assert sorted(before) == sorted((host / "store").rglob("*"))
    make(tell, host / "store")
    assert [store["is_gone"] for store in told()["stores"]] == [False]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_store_with_pending_files_stays_with_the_way_out(host, tell, fail, monkeypatch, is_gone):
    make(tell, host / "store")
    with monkeypatch.context() as patch:

        def refuse(*_, **__):
            raise StoreError("not now")

        patch.setattr(FlusherClient, "request", refuse)  # no flusher, so the file stays pending
        fs, path = fsspec.url_to_fs(f"tierfs::file://{host}/store", ack="staged", skip_instance_cache=True)
        fs.pipe_file(f"{path}/run/late", os.urandom(1 << 20))
        close()
    if is_gone:
        (host / "store").rename(host / "aside")
    code, error = fail("forget", host / "store", "--yes")
    assert code == 8
    assert "run/late" in error["message"]
    assert f"`tierfs wait {host}/store`" in error["message"]
    assert ("put the store back" in error["message"]) == is_gone
    if is_gone:
        assert main(["forget", "--gone", "--yes"]) == 8
        (host / "aside").rename(host / "store")
    tell("wait", host / "store")
    close()
    tell("flusher", "stop", host / "store")
    tell("forget", host / "store", "--yes")
    assert kept(host) == (0, 0, 0)


def test_a_store_that_a_process_has_open_stays(host, tell, fail):
    make(tell, host / "store")
    open_store(parse_url(f"tierfs::file://{host}/store"))
    code, error = fail("forget", host / "store", "--yes")
    assert code == 8
    assert f"(pid {os.getpid()})" in error["message"]
    close()
    tell("forget", host / "store", "--yes")


def test_a_flusher_of_a_store_that_is_gone_is_named_and_stopped(host, tell, fail):
    make(tell, host / "store")
    (directory,) = (host / "state" / "stores").glob("*")
    with subprocess.Popen([*PROGRAM, "flusher", "run", str(host / "store")], stderr=subprocess.DEVNULL) as flusher:
        try:
            while not (directory / "flusher.sock").exists():
                assert flusher.poll() is None
            shutil.rmtree(host / "store")
            code, error = fail("forget", host / "store", "--yes")
            assert code == 8
            assert f"`tierfs flusher stop {host}/store`" in error["message"]
            assert str(flusher.pid) in error["message"]
            tell("flusher", "stop", host / "store")
        finally:
            flusher.terminate()
    tell("forget", "--gone", "--yes")
    assert kept(host) == (0, 0, 0)


def test_two_at_once_remove_it_once(host, tell):
    make(tell, host / "store")
    shutil.rmtree(host / "store")
    both = [subprocess.Popen([*PROGRAM, "forget", "--gone", "--yes"], stdout=subprocess.PIPE) for _ in range(2)]
    shown = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(b"removed  " in text for text in shown) == 1
    assert kept(host) == (0, 0, 0)


def test_a_kill_in_the_middle_leaves_no_store_and_the_next_call_the_rest(host, tell, monkeypatch):
    make(tell, host / "one")
    make(tell, host / "two")
    with monkeypatch.context() as patch:
        # A kill between the rename and the end of the deletion, which no outside process can time.
        patch.setattr(shutil, "rmtree", lambda _path: (_ for _ in ()).throw(KeyboardInterrupt))
        tell("forget", host / "one", "--yes", code=130)
    assert kept(host) == (1, 1, 0)
    assert f"{host}/one" not in tell()
    assert "nothing to remove" in tell("forget", "--gone", "--yes")
    assert kept(host) == (1, 0, 0)


def test_a_path_that_is_none_of_this_hosts_is_refused(host, tell, fail):
    make(tell, host / "store")
    for other in (host, host / "store" / "run", host / "elsewhere", "0" * 32):
        assert fail("forget", other, "--yes")[0] == 3
    (directory,) = (host / "state" / "stores").glob("*")
    directory.rename(host / "mine")
    directory.symlink_to(host / "mine")
    assert fail("forget", host / "store", "--yes")[0] == 3
    assert (host / "mine" / "place.json").exists()
    assert fail("forget")[0] == fail("forget", host / "store", "--gone")[0] == 2
    assert fail("forget", "")[0] == 2
