"""A copy of a store has the same id. Saves to the store never reach the copy, nor the other way round."""

import errno
import importlib
import json
import os
import re
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from support.opened import know_no_store

import tierfs
from tierfs.cli import main
from tierfs.errors import CapacityError, InvalidInputError, ReadOnlyError, StoreError, StoreNotFoundError
from tierfs.format import keys
from tierfs.format.keys import ChunkName
from tierfs.host.host import Host
from tierfs.host.local_state import check, claim
from tierfs.session import compose, open_store, parse_url
from tierfs.session.open import open_bare
from tierfs.session.settings import TierOptions
from tierfs.session.tiers import publisher_of

opening = importlib.import_module("tierfs.session.open")
UUID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "state")


@pytest.fixture
def store(tmp_path):
    root = tmp_path / "store"
    tierfs.init(f"file://{root}")
    return root


@pytest.fixture
def options(tmp_path):
    return {"state_dir": str(tmp_path / "state"), "ram": "64MiB", "nvme": "0"}


def open_at(root, **options):
    return fsspec.url_to_fs(f"tierfs::file://{root}", skip_instance_cache=True, **options)


def save_without_a_flusher(store, options, monkeypatch):
    fs, path = open_at(store, ack="staged", **options)
    with monkeypatch.context() as patch:
        patch.setattr("tierfs.host.write.writer.SlabWriter._tell", lambda _: None)
        fs.pipe(f"{path}/a", b"saved")
    return fs, path


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def copied(store):
    fs, path = open_at(store, ram=0, nvme=0)
    fs.pipe(f"{path}/latest", b"saved to the store")
    copy = store.with_name("copy")
    shutil.copytree(store, copy)
    return copy


def test_local_tiers_are_not_shared_with_a_copy(store, options):
    copy = copied(store)
    fs, path = open_at(store, ack="staged", **options)
    fs.pipe(f"{path}/latest", b"saved to the store later")
    with pytest.raises(InvalidInputError, match="has the id of a store that this host has local tiers for"):
        open_at(copy, **options)[0].ls(str(copy))
    fs.wait(path, "object")
    assert open_at(store, ram=0, nvme=0)[0].cat(str(store / "latest")) == b"saved to the store later"
    assert open_at(copy, ram=0, nvme=0)[0].cat(str(copy / "latest")) == b"saved to the store"


def test_a_copy_is_used_without_default_local_tiers(store, options, monkeypatch, caplog):
    monkeypatch.setenv("TIERFS_STATE_DIR", options["state_dir"])
    copy = copied(store)
    fs, path = open_at(store, ack="staged", **options)
    fs.pipe(f"{path}/latest", b"saved to the store later")
    other, there = open_at(copy)
    other.pipe(f"{there}/latest", b"saved to the copy")
    assert "is used without local tiers" in caplog.text
    assert other.ack(f"{there}/latest") == "object"
    fs.wait(path, "object")
    assert fs.cat(f"{path}/latest") == b"saved to the store later"
    assert open_at(copy, ram=0, nvme=0)[0].cat(str(copy / "latest")) == b"saved to the copy"


def test_a_flusher_of_a_store_is_not_one_of_its_copy(store, options, capsys):
    copy = copied(store)
    fs, path = open_at(store, ack="staged", **options)
    fs.pipe(f"{path}/latest", b"saved to the store later")
    for command in ("run", "stop"):
        told = ["flusher", command, f"file://{copy}", "--state-dir", options["state_dir"]]
        assert main(told) == 2
        assert "has the id of a store" in capsys.readouterr().err
    fs.wait(path, "object")


def test_a_store_is_the_same_by_a_link_and_after_a_move(store, options, tmp_path):
    fs, path = open_at(store, ack="staged", **options)
    fs.pipe(f"{path}/a", b"saved")
    fs.wait(path, "object")
    link = tmp_path / "link"
    link.symlink_to(store)
    assert open_at(link, **options)[0].cat(f"{link}/a") == b"saved"
    moved = store.rename(tmp_path / "moved")
    assert open_at(moved, **options)[0].cat(f"{moved}/a") == b"saved"


def test_the_first_one_has_them(host):
    directory = claim(host, UUID, ("a", "number 1"), "url")
    assert directory == host.store_directory(UUID)
    for places in (("a", "number 2"), ("b", "number 2"), ("a", "number 2"), ("a", "number 1")):
        assert claim(host, UUID, places, "url") == directory
    check(directory, ("a", "number 3"), "url")
    for look in (
        lambda: check(directory, ("b", "number 2"), "url"),
        lambda: claim(host, UUID, ("b", "number 2"), "url"),
    ):
        with pytest.raises(InvalidInputError, match=f"at b, not at a.*remove {directory}/place.json"):
            look()
    assert json.loads((directory / "place.json").read_bytes()) == ["a", "number 1"]
    os.unlink(directory / "place.json")
    check(directory, ("b",), "url")
    assert not (directory / "place.json").exists()
    claim(host, UUID, ("b", "number 2"), "url")
    assert json.loads((directory / "place.json").read_bytes()) == ["b", "number 2"]


@pytest.mark.parametrize("kept", [b"hello", b'["file:/st', b"{}", b"5", b"[5]", b'["\xff"]'])
def test_tiers_without_an_owner_are_not_taken(host, kept):
    directory = claim(host, UUID, ("a",), "url")
    (directory / "place.json").write_bytes(kept)
    with pytest.raises(StoreError, match="does not say which store"):
        claim(host, UUID, ("a",), "url")
    (directory / "place.json").write_bytes(b"")  # an empty file counts as none
    claim(host, UUID, ("b",), "url")
    assert json.loads((directory / "place.json").read_bytes()) == ["b"]


def test_a_store_and_a_copy_at_its_path_do_not_share_tiers(store, options):
    fs, path = open_at(store, ack="staged", **options)
    fs.pipe(f"{path}/a", b"saved")
    fs.wait(path, "object")
    old = store.rename(store.with_name("old"))
    shutil.copytree(old, store)
    assert open_at(store, **options)[0].cat(f"{store}/a") == b"saved"
    with pytest.raises(InvalidInputError, match="has the id of a store"):
        open_at(old, **options)[0].ls(str(old))


def test_saves_follow_the_current_owner(store, options):
    copy = copied(store)
    fs, path = open_at(store, ack="staged", **options)
    fs.pipe(f"{path}/latest", b"saved to the store later")
    fs.wait(path, "object")
    (place,) = store.with_name("state").glob("stores/*/place.json")
    place.unlink()
    other, there = open_at(copy, ack="staged", **options)
    other.pipe(f"{there}/new", b"saved to the copy")
    other.wait(there, "object")
    assert open_at(copy, ram=0, nvme=0)[0].cat(str(copy / "new")) == b"saved to the copy"
    assert not open_at(store, ram=0, nvme=0)[0].exists(str(store / "new"))


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_store_moved_under_its_flusher_gets_its_files(store, options, is_copied):
    fs, path = open_at(store, ack="staged", **options)
    fs.pipe(f"{path}/a", b"saved")
    fs.wait(path, "object")
    moved = store.rename(store.with_name("moved"))
    if is_copied:
        shutil.copytree(moved, store)
    fs, path = open_at(moved, ack="staged", **options)
    fs.pipe(f"{path}/b", b"saved to where it is now")
    fs.wait(path, "object")
    assert open_at(moved, ram=0, nvme=0)[0].cat(str(moved / "b")) == b"saved to where it is now"
    if is_copied:
        assert not open_at(store, ram=0, nvme=0)[0].exists(str(store / "b"))


def test_a_flusher_of_foreign_tiers_publishes_nothing(store, host):
    publisher, late = (publisher_of(lambda: open_bare(parse_url(f"file://{store}"))[0], host) for _ in range(2))
    found = open_bare(parse_url(f"file://{store}"))[0]
    directory = claim(host, found.descriptor.uuid, found.objects.places(), "url")
    publisher.report_damage(keys.chunk_key(ChunkName(bytes(16))))
    (directory / "place.json").unlink()
    claim(host, found.descriptor.uuid, ("elsewhere",), "url")
    for each in (publisher, late):
        with pytest.raises(InvalidInputError, match="at elsewhere"):
            each.report_damage(keys.chunk_key(ChunkName(bytes(16))))


class Remote(LocalFileSystem):
    protocol = "placed"
    away = ""

    def info(self, path, **options):
        self._look(path)
        return super().info(path, **options)

    def ls(self, path, *arguments, **options):
        self._look(path)
        return super().ls(path, *arguments, **options)

    def _look(self, path):
        if self.away and self.away in path:
            raise ConnectionError("it is away")


def test_a_copy_does_not_have_them_while_it_is_away_either(tmp_path, options):
    fsspec.register_implementation("placed", Remote, clobber=True)
    store, copy = tmp_path / "remote", tmp_path / "copy"
    tierfs.init(f"placed://{store}")
    shutil.copytree(store, copy)

    def look(root):
        open_store(replace(parse_url(f"placed://{root}"), tiers=TierOptions(**options)))

    look(store)
    with pytest.raises(InvalidInputError, match="has the id of a store"):
        look(copy)
    Remote.away = str(copy)
    with pytest.raises(InvalidInputError, match="has the id of a store"):
        look(copy)


def test_unreadable_tiers_report_no_level(store, options, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", options["state_dir"])
    fs, path = open_at(store, ack="local")
    fs.pipe(f"{path}/a", b"saved")
    fs.wait(path, "object")
    os.chmod(options["state_dir"], 0o755)  # as `cp -r` creates it
    know_no_store(monkeypatch)
    fs, path = open_at(store)
    assert fs.cat(f"{path}/a") == b"saved"
    for ask in (lambda: fs.wait(path, "object"), lambda: fs.ack(f"{path}/a")):
        with pytest.raises(ReadOnlyError, match="closed to others"):
            ask()
    assert main(["wait", f"file://{store}"]) == 10
    os.chmod(options["state_dir"], 0o700)


def test_tiers_without_room_for_an_owner_hold_nothing(store, options, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", options["state_dir"])
    know_no_store(monkeypatch)
    fs, path = open_at(store)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert fs.exists(path)
    fs.pipe(f"{path}/a", b"saved")
    fs.wait(path, "object")
    assert fs.ack(f"{path}/a") == "object"


def test_known_places_need_no_owner_file(host, monkeypatch, caplog):
    directory = claim(host, UUID, ("a", "number 1"), "url")
    monkeypatch.setattr("os.fsync", full)
    assert claim(host, UUID, ("a", "number 2"), "url") == directory
    assert "cannot be recorded" in caplog.text
    with pytest.raises(CapacityError, match="cannot be written"):
        claim(host, UUID[::-1], ("a",), "url")


@pytest.mark.parametrize("is_pending", [True, False])
def test_an_unmounted_directory_is_no_missing_store(store, options, monkeypatch, is_pending):
    know_no_store(monkeypatch)
    if is_pending:
        fs, path = save_without_a_flusher(store, options, monkeypatch)
    else:
        fs, path = open_at(store, ack="staged", **options)
        fs.pipe(f"{path}/a", b"saved")
        fs.wait(path, "object")
    hidden = store.rename(store.with_name("hidden"))
    store.mkdir()

    know_no_store(monkeypatch)
    try:
        if is_pending:
            with pytest.raises(StoreError, match=f"pending for the store that was at {store}, .*: mount it") as caught:
                open_at(store, **options)[0].exists(f"{store}/a")
            assert caught.value.transient
        else:
            assert not open_at(store, **options)[0].exists(f"{store}/a")
        with pytest.raises(StoreError if is_pending else StoreNotFoundError):
            open_at(store, **options)[0].pipe(f"{store}/b", b"")
    finally:
        store.rmdir()
        hidden.rename(store)
    assert open_at(store, **options)[0].cat(f"{store}/a") == b"saved"
    fs.wait(path, "object")


@pytest.fixture
def left(store, options, monkeypatch):
    """A store that is gone, with changes that no flusher has flushed."""
    save_without_a_flusher(store, options, monkeypatch)
    know_no_store(monkeypatch)
    return store


def test_a_directory_whose_content_is_gone_is_told_by_its_path(left, options):
    for entry in os.scandir(left):
        shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
    with pytest.raises(StoreError, match=f"pending for the store that was at {left}, "):
        open_at(left, **options)[0].exists(f"{left}/a")


def test_a_directory_with_a_reused_inode_has_nothing_pending(left, options, tmp_path):
    other = left.rename(tmp_path / "other")
    for entry in os.scandir(other):
        shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
    assert not open_at(other, **options)[0].exists(f"{other}/a")


def test_the_message_names_all_pending_files(left, options, tmp_path, monkeypatch):
    hidden = left.rename(tmp_path / "hidden")
    with pytest.raises(StoreError, match="mount it") as caught:
        open_at(left, **options)[0].exists(f"{left}/a")
    where, directory, pattern = re.search(
        r"`tierfs flusher stop (\S+)` and remove (\S+) and (\S+) while", str(caught.value)
    ).groups()
    assert where == str(left)
    (segment,) = Path(pattern).parent.glob(Path(pattern).name)
    segment.unlink()
    shutil.rmtree(directory)
    assert not open_at(left, **options)[0].exists(f"{left}/a")
    hidden.rename(left)


def test_another_stores_place_may_be_unknown(left, options, tmp_path, caplog):
    (kept,) = (tmp_path / "state" / "stores").glob("*/place.json")
    kept.write_bytes(b"damaged")
    assert not open_at(tmp_path / "new", **options)[0].exists(f"{tmp_path}/new/a")
    assert "the pending changes of one store are unknown" in caplog.text


def test_no_store_is_made_where_one_with_changes_pending_was(left, options, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", options["state_dir"])
    tierfs.init(f"file://{left}")
    know_no_store(monkeypatch)
    hidden = left.rename(tmp_path / "hidden")
    for _ in range(2):
        with pytest.raises(StoreError, match=f"this host has changes pending for the store that was at {left}, "):
            tierfs.init(f"file://{left}")
        left.mkdir(exist_ok=True)
    shutil.rmtree(left)
    hidden.rename(left)
    know_no_store(monkeypatch)
    assert open_at(left, **options)[0].cat(f"{left}/a") == b"saved"


def opened_anew(root, **options):
    """Open a store as another process does."""
    for store in opening.open_stores.values():
        if store.tiers is not None:
            store.tiers.close()
    opening.open_stores.clear()
    compose.open_tiers.clear()
    return open_at(root, **options)


def place_file(options):
    (path,) = Path(options["state_dir"]).glob("stores/*/place.json")
    return path


@pytest.mark.parametrize("damage", [b'["file:/st', "a directory"])
@pytest.mark.parametrize("asked", ["asked for", "by default"])
def test_published_files_are_read_without_an_owner(store, options, monkeypatch, caplog, damage, asked):
    monkeypatch.setenv("TIERFS_STATE_DIR", options["state_dir"])
    fs, path = open_at(store, **options)
    fs.pipe(f"{path}/a", b"published" * 10_000, ack="object")
    kept = place_file(options)
    if damage == "a directory":
        kept.unlink()
        kept.mkdir()
    else:
        kept.write_bytes(damage)
    fs, path = opened_anew(store, **(options if asked == "asked for" else {}))
    assert fs.cat(f"{path}/a") == b"published" * 10_000
    for _ in range(3):
        assert fs.ls(path, detail=False) == [f"{path}/a"]
    with pytest.raises(StoreError, match="does not say which store"):
        fs.wait(path, "object", timeout=5)
    told = [record for record in caplog.records if "place.json" in record.getMessage()]
    assert len(told) == 1


def test_pending_files_without_an_owner_wait(left, options):
    kept = place_file(options)
    whose = kept.read_bytes()
    kept.write_bytes(b"[")
    fs, path = opened_anew(left, **options)
    assert not fs.exists(f"{path}/a")
    with pytest.raises(StoreError, match=r"place.json does not say which store"):
        fs.cat(f"{path}/a")
    with pytest.raises(
        StoreError, match=r"place.json does not say which store .* neither read nor flushed until this file is removed"
    ):
        fs.wait(path, "object", timeout=5)
    fs.pipe(f"{path}/direct", b"goes past the tiers")
    assert fs.cat(f"{path}/direct") == b"goes past the tiers"
    kept.write_bytes(whose)
    fs, path = opened_anew(left, **options)
    fs.wait(path, "object")
    assert fs.cat(f"{path}/a") == b"saved"


def test_many_instances_and_threads_say_the_same_thing_once(store, options, monkeypatch, caplog):
    monkeypatch.setenv("TIERFS_STATE_DIR", "/proc/self/no")  # local tiers are impossible there
    opened = [open_at(store, timeout=number) for number in range(1, 6)]
    threads = [threading.Thread(target=fs.ls, args=(path,)) for fs, path in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = Counter(record.getMessage() for record in caplog.records)
    assert set(told.values()) == {1}
    assert any("is used without local tiers" in text for text in told)
