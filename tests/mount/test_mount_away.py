"""A mount whose object tier hangs: saves below ``object`` go on, and an operation that needs the tier fails soon."""

import os
import struct
import threading
import time
from dataclasses import replace

import pytest
from support.mount_hand import Hand
from support.tiered import Host
from support.waiting import HANG_S

from tierfs import store as verbs
from tierfs.digest import DigestKind
from tierfs.errors import ConflictError, NotFoundError
from tierfs.host.pending.levels import Level
from tierfs.mount import wire
from tierfs.mount.wire import Opcode, Valid
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.store import offline
from tierfs.store.create import create_store
from tierfs.testing.faults import Fault, FaultyObjects, PlannedFault

SOON_S = 60.0


class Hanging(MemoryObjects):
    """An object tier whose requests hang while `answers` is not set."""

    answers = threading.Event()

    def __getattribute__(self, name):
        if name in ("put", "get", "read", "head", "list", "delete"):
            assert Hanging.answers.wait(HANG_S)
        return super().__getattribute__(name)


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr("tierfs.store.offline.LOOK_S", 0.2)
    root = f"/mount-{os.urandom(8).hex()}"
    Hanging.answers.set()
    descriptor, _ = create_store(MemoryObjects(root), "memory://s", digest=DigestKind.XXH3_128, random_bytes=bytes(16))
    far = replace(descriptor, endpoint=replace(descriptor.endpoint, host_local=False))
    host = Host(tmp_path, Hanging(root), far)
    yield host
    Hanging.answers.set()
    host.close()


@pytest.fixture
def hand(host, tmp_path):
    """A mount. The host has seen ``known/file`` in the object tier, which hangs then."""
    hand = Hand(host.store, tmp_path)
    hand.tree.make_directory(*hand.parent("known"), 0o755)
    hand.write_file("known/file", b"old")
    verbs.wait(host.store, "", Level.OBJECT)
    assert hand.read_file("known/file") == b"old"
    Hanging.answers.clear()
    return hand


def come_back(host):
    offline.LOOK_S = HANG_S  # the fixture's change is undone, too
    Hanging.answers.set()
    host.tiers.away_until_s = 0.0
    verbs.wait(host.store, "", Level.OBJECT)


def make(hand, path):
    hand.tree.make_directory(*hand.parent(path), 0o755)


def rename(hand, old, new):
    hand.tree.rename(*hand.parent(old), *hand.parent(new), 0)


def test_a_checkpoint_is_saved_while_the_object_tier_hangs(hand, host, tmp_path):
    began = time.monotonic()
    make(hand, "step")
    make(hand, "step/deep")
    assert hand.names("step") == ["deep"]
    verbs.save(host.store, "step/other door/file", b"x")
    listed = [node for _, node in hand.tree.list_directory(hand.node("step"))]
    assert hand.tree.read_markers(listed) == {hand.node("step/other door")}
    hand.tree.remove_file(*hand.parent("step/other door/file"))
    hand.write_file("step/tmp", b"x" * 200_000)
    rename(hand, "step/tmp", "step/file")
    hand.write_file("step/deep/file", b"y")
    hand.write_file("known/new", b"z")
    hand.write_file("known/file", b"new")
    hand.close(hand.create("step/lock", flags=os.O_CREAT | os.O_EXCL | os.O_RDWR))
    set_mode(hand, "step/file", 0o600)
    assert hand.names("step") == ["deep", "file", "lock"]
    hand.tree.remove_file(*hand.parent("step/lock"))
    make(hand, "step/gone")
    hand.tree.remove_directory(*hand.parent("step/gone"))
    with pytest.raises(FileExistsError):
        make(hand, "known")
    assert hand.read_file("step/file") == b"x" * 200_000
    make(hand, "empty")
    assert time.monotonic() - began < SOON_S
    come_back(host)
    assert sorted(hand.names()) == ["empty", "known", "step"]
    found = verbs.find(host.plain(), "")
    assert {entry.path for entry in found if not entry.is_directory} == {
        "known/file",
        "known/new",
        "step/deep/file",
        "step/file",
    }
    assert verbs.load(host.plain(), "known/file") == b"new"
    hand.node("empty")
    assert verbs.stat(host.plain(), "empty").is_directory
    assert Hand(host.store, tmp_path).node("step/file").attributes.mode == 0o100600


def set_mode(hand, path, mode):
    node = hand.node(path)
    hand.state.nodes.told(node)
    body = struct.pack("<IIQQQQQQIIIIIIII", Valid.MODE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, mode, 0, 0, 0, 0)
    hand.requests(wire.RequestHeader(128, Opcode.SETATTR, 1, node.id, 0, 0, 0, 0), memoryview(body))


@pytest.mark.parametrize(
    "operate",
    [
        lambda hand: hand.read_file("known/file"),
        lambda hand: hand.names(),
        lambda hand: hand.names("known"),
        lambda hand: hand.tree.remove_file(*hand.parent("known/file")),
        lambda hand: hand.tree.remove_directory(*hand.parent("known")),
        lambda hand: rename(hand, "known/file", "known/other"),
        lambda hand: rename(hand, "known", "other"),
        lambda hand: set_mode(hand, "known/file", 0o600),
        lambda hand: set_mode(hand, "known", 0o700),
    ],
    ids=["read", "list root", "list", "unlink", "rmdir", "rename", "rename directory", "chmod", "chmod directory"],
)
def test_an_operation_that_needs_the_object_tier_fails_soon(hand, host, operate):
    failed = []

    def run():
        try:
            operate(hand)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert "did not answer" in str(failed[0])
    come_back(host)
    assert hand.read_file("known/file") == b"old"


def test_a_mount_at_object_level_makes_nothing_blindly(hand, host):
    host.store.ack = Level.OBJECT
    host.store._objects = FaultyObjects(host.objects, [PlannedFault(Fault.REFUSED)] * 9)
    Hanging.answers.set()
    with pytest.raises(OSError, match="refused"):
        hand.node("known/file")
    with pytest.raises(OSError, match="refused"):
        hand.tree.make_directory(hand.state.nodes.root, "new", 0o755)


@pytest.mark.parametrize("flags", [os.O_CREAT, os.O_CREAT | os.O_EXCL])
def test_a_name_made_blindly_is_a_conflict_if_another_host_has_it(hand, host, flags):
    Hanging.answers.set()
    verbs.save(host.plain(), "theirs", b"theirs")
    Hanging.answers.clear()
    handle = hand.create("theirs", flags=flags | os.O_RDWR)
    hand.files.write(handle, 0, memoryview(b"ours"))
    hand.close(handle)
    assert hand.read_file("theirs") == b"ours"
    with pytest.raises(ConflictError):
        come_back(host)
    assert verbs.load(host.plain(), "theirs") == b"theirs"


def test_a_known_directory_is_one_for_a_new_process(hand, host):
    host.store.host_records.flush()
    host.store.records.clear()
    assert verbs.kind_of(host.store, "known") == "directory"
    assert verbs.kind_of(host.store, "known/file") == "file"
    assert verbs.kind_of(host.store, "other") is None
    with pytest.raises(NotFoundError):
        Hand(host.store, hand.state.staging).node("other")
