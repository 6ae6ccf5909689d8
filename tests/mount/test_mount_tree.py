"""Make, list, rename and remove names."""

import errno
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.mount_hand import Hand
from support.waiting import HANG_S

from tierfs import store as verbs
from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, StoreError
from tierfs.mount import tree, wire
from tierfs.mount.overlay import COPY_BYTES
from tierfs.mount.state import MISSING_S
from tierfs.mount.tree import NO_REPLACE
from tierfs.mount.wire import Valid
from tierfs.session import TierOptions, init, open_store
from tierfs.session.url import Location
from tierfs.store import WriteMode
from tierfs.store.tree.records import observe_marker
from tierfs.testing import faults


def rename(hand, old, new, flags=0):
    hand.tree.rename(*hand.parent(old), *hand.parent(new), flags)


def ask(hand, opcode, node, body):
    """Send a request as the kernel does, and return the answer."""
    return hand.requests(wire.RequestHeader(40 + len(body), opcode, 1, node, 0, 0, 0, 0), memoryview(body))


@pytest.fixture
def around(monkeypatch):
    """Call a function before or after each call of a verb of the store. It gets the arguments of the call."""

    def wrap(verb, *, before=lambda *_: None, after=lambda *_: None):
        real = getattr(verbs, verb)

        def wrapped(*arguments, **options):
            before(*arguments)
            found = real(*arguments, **options)
            after(*arguments)
            return found

        monkeypatch.setattr(verbs, verb, wrapped)

    return wrap


@pytest.fixture
def observed(monkeypatch):
    """Call a function after each marker of a directory that a listing reads."""

    def call(then):
        monkeypatch.setattr(tree, "observe_marker", lambda *arguments: (observe_marker(*arguments), then())[0])

    return call


def test_a_file_that_is_created_exclusively_is_a_lock(hand, other, tmp_path):
    exclusive = os.O_RDWR | os.O_CREAT | os.O_EXCL
    second = Hand(hand.state.store, tmp_path / "staging")
    assert not hand.exists("lock")
    assert not second.exists("lock")
    handle = hand.create("lock", flags=exclusive, mode=0o600)
    with pytest.raises(FileExistsError):
        second.create("lock", flags=exclusive)
    with pytest.raises(AlreadyExistsError):
        verbs.save(other if hand.state.store.tiers is None else hand.state.store, "lock", b"", mode=WriteMode.CREATE)
    assert second.node("lock").attributes.mode == 0o100600
    hand.files.write(handle, 0, memoryview(b"mine"))
    hand.close(handle)
    assert second.read_file("lock") == b"mine"
    hand.tree.remove_file(*hand.parent("lock"))
    second.close(second.create("lock", flags=exclusive))
    assert hand.read_file("lock") == b""


def test_a_create_finds_what_another_host_made_since_the_name_was_missing(hand, other):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    assert not hand.exists("a")
    verbs.save(other, "a", b"theirs")
    time.sleep(MISSING_S)
    handle = hand.create("a")
    assert hand.read(handle) == b"theirs"
    hand.close(handle)


def test_a_rename_replaces_what_has_the_name(hand):
    hand.write_file("tmp", b"new")
    hand.write_file("a", b"old")
    handle = hand.open("a")
    rename(hand, "tmp", "a")
    assert hand.names() == ["a"]
    assert hand.read_file("a") == b"new"
    assert hand.read(handle) == b"old"


def test_a_close_during_a_rename_over_its_file_succeeds(hand, monkeypatch):
    hand.write_file("tmp", b"new")
    hand.write_file("a", b"old")
    handle = hand.open("a", os.O_RDWR)
    hand.files.write(handle, 0, memoryview(b"mid"))
    is_publishing, commit, keep = threading.Event(), verbs.Writer.commit, hand.files.keep_bytes
    closed = []

    def slow(writer):
        is_publishing.set()
        time.sleep(0.3)
        return commit(writer)

    def close_after(node):
        keep(node)
        closed.append(pool.submit(hand.close, handle))
        is_publishing.wait(0.3)

    monkeypatch.setattr(verbs.Writer, "commit", slow)
    monkeypatch.setattr(hand.files, "keep_bytes", close_after)
    with ThreadPoolExecutor(1) as pool:
        rename(hand, "tmp", "a")
        closed[0].result(HANG_S)
    assert hand.read_file("a") == b"new"


def test_a_rename_that_must_not_replace_is_refused(hand):
    hand.write_file("a", b"a")
    hand.write_file("b", b"b")
    with pytest.raises((FileExistsError, AlreadyExistsError)):
        rename(hand, "a", "b", NO_REPLACE)
    rename(hand, "a", "c", NO_REPLACE)
    assert hand.names() == ["b", "c"]
    with pytest.raises(OSError) as caught:
        rename(hand, "b", "c", 2)  # RENAME_EXCHANGE
    assert caught.value.errno == errno.EINVAL


def test_a_file_that_is_open_is_published_under_its_new_name(hand):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"x"))
    rename(hand, "a", "b")
    hand.close(handle)
    assert [entry.path for entry in verbs.list_directory(hand.state.store, "")] == ["b"]


def test_an_open_file_renamed_over_another_and_removed_takes_both_away(hand):
    hand.write_file("b", b"old")
    handle = hand.create("a")
    rename(hand, "a", "b")
    hand.tree.remove_file(hand.state.nodes.root, "b")
    hand.close(handle)
    assert verbs.list_directory(hand.state.store, "") == []


def test_a_directory_is_moved_with_all_in_it(hand):
    for folder in ("d", "d/e"):
        hand.tree.make_directory(*hand.parent(folder), 0o755)
    hand.write_file("d/e/f", b"x")
    handle = hand.open("d/e/f", os.O_RDWR)
    rename(hand, "d", "g")
    assert hand.names() == ["g"]
    assert hand.read_file("g/e/f") == b"x"
    hand.files.write(handle, 0, memoryview(b"y"))
    hand.close(handle)
    assert verbs.load(hand.state.store, "g/e/f") == b"y"


def test_a_directory_stays_when_the_last_file_leaves_it(hand):
    verbs.save(hand.state.store, "d/a", b"x")
    hand.tree.remove_file(*hand.parent("d/a"))
    assert hand.names("d") == []
    hand.tree.remove_directory(*hand.parent("d"))
    assert hand.names() == []


def test_a_directory_with_a_file_that_is_not_published_is_not_empty(hand):
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    handle = hand.create("d/a")
    with pytest.raises(OSError) as caught:
        hand.tree.remove_directory(*hand.parent("d"))
    assert caught.value.errno == errno.ENOTEMPTY
    assert hand.names("d") == ["a"]
    hand.close(handle)


@pytest.mark.parametrize("path", ["\u5b57" * 28, f"{'d' * 200}/{'d' * 200}/{'d' * 200}/{'x' * 200}"])
@pytest.mark.parametrize("make", ["file", "directory", "renamed file", "renamed directory", "look"])
def test_a_name_or_path_that_is_too_long_is_refused(hand, path, make):
    for number in (1, 2, 3) if "/" in path else ():
        hand.tree.make_directory(*hand.parent("/".join(path.split("/")[:number])), 0o755)
    hand.write_file("a", b"x")
    hand.tree.make_directory(*hand.parent("b"), 0o755)
    operations = {
        "file": hand.create,
        "directory": lambda name: hand.tree.make_directory(*hand.parent(name), 0o755),
        "renamed file": lambda name: rename(hand, "a", name),
        "renamed directory": lambda name: rename(hand, "b", name),
        "look": hand.node,
    }
    with pytest.raises(OSError) as caught:
        operations[make](path)
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_rename_that_makes_a_path_too_long_moves_nothing(hand):
    for folder in ("d", "e" * 200, f"{'e' * 200}/{'e' * 200}"):
        hand.tree.make_directory(*hand.parent(folder), 0o755)
    for name in ("a", "b" * 200, f"c{'c' * 199}"):
        hand.write_file(f"d/{name}", b"x")
    hand.tree.make_directory(*hand.parent(f"d/{'f' * 250}"), 0o755)
    hand.write_file(f"d/{'f' * 250}/{'g' * 250}", b"x")
    with pytest.raises(OSError) as caught:
        rename(hand, "d", f"{'e' * 200}/{'e' * 200}/d")
    assert caught.value.errno == errno.ENAMETOOLONG
    assert len(hand.names("d")) == 4


@pytest.mark.parametrize("remove", ["file", "rename", "rename over", "rename the directory"])
def test_a_name_is_taken_at_once_while_its_file_is_stored(hand, monkeypatch, remove):
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    handle = hand.create("d/big", flags=os.O_RDWR | os.O_CREAT)
    hand.files.allocate(handle, 0, 20 * COPY_BYTES, 0)
    hand.write_file("a", b"x")
    begun, pieces, write = threading.Event(), [], verbs.Writer.write

    def slow(writer, data):
        begun.set()
        time.sleep(0.1)
        pieces.append(len(data))
        return write(writer, data)

    monkeypatch.setattr(verbs.Writer, "write", slow)
    with ThreadPoolExecutor(1) as pool:
        stored = pool.submit(hand.files.release, handle)
        begun.wait(HANG_S)
        match remove:
            case "file":
                hand.tree.remove_file(*hand.parent("d/big"))
            case "rename":
                rename(hand, "d/big", "d/moved")
            case "rename over":
                rename(hand, "a", "d/big")
            case "rename the directory":
                rename(hand, "d", "e")
        assert len(pieces) < 15
        monkeypatch.undo()
        stored.result(HANG_S)
    there = "e/big" if remove == "rename the directory" else "d/moved" if remove == "rename" else ""
    found = {entry.path: entry.length for entry in verbs.find(hand.state.store, "") if not entry.is_directory}
    assert found == {"d/big" if remove == "rename over" else "a": 1} | ({there: 20 * COPY_BYTES} if there else {})


def test_the_private_directory_is_hidden(hand):
    assert hand.names() == []
    with pytest.raises(FileNotFoundError):
        hand.node(".tierfs")
    for make in (
        lambda: hand.create(".tierfs"),
        lambda: hand.tree.make_directory(hand.state.nodes.root, ".tierfs", 0o755),
        lambda: rename(hand, "a", ".tierfs"),
    ):
        hand.write_file("a", b"x")
        with pytest.raises(PermissionError):
            make()
    assert hand.names() == ["a"]


def test_files_of_a_complete_checkpoint_are_trusted_for_longer(hand):
    for name in ("c/.metadata", "c/rank-0.safetensors", "d/loose"):
        verbs.save(hand.state.store, name, b"x")
    hand.names("c")
    hand.names("d")
    assert hand.state.valid_s(hand.node("c/rank-0.safetensors")) > 10 > hand.state.valid_s(hand.node("d/loose"))
    handle = hand.open("c/rank-0.safetensors", os.O_RDWR)
    hand.files.write(handle, 0, memoryview(b"y"))
    assert hand.state.valid_s(handle.node) <= 1
    hand.close(handle)


def test_an_inode_number_is_the_same_in_the_next_mount(hand, tmp_path):
    hand.write_file("a", b"x")
    assert Hand(hand.state.store, tmp_path / "staging").node("a").attributes.ino == hand.node("a").attributes.ino


def test_inodes_that_nobody_needs_are_dropped(hand):
    hand.write_file("a", b"x")
    node = hand.node("a")
    hand.state.nodes.forget(node.id, node.lookups)
    assert hand.state.nodes.get(node.id) is None
    assert hand.read_file("a") == b"x"


def test_a_listing_that_was_closed_leaves_no_inodes(hand):
    for number in range(3):
        verbs.save(hand.state.store, f"d/{number}", b"x")
    known = len(hand.state.nodes)
    node = hand.node("d").id
    number = ask(hand, wire.Opcode.OPENDIR, node, bytes(8))[:8]
    page = ask(hand, wire.Opcode.READDIR, node, number + struct.pack("<QIIQII", 0, 4096, 0, 0, 0, 0))
    assert page.count(b"\x08\0\0\0") >= 3
    ask(hand, wire.Opcode.RELEASEDIR, node, number + bytes(16))
    assert len(hand.state.nodes) <= known + 1


def test_an_inode_that_is_forgotten_while_it_is_looked_up_can_be_used(hand):
    hand.write_file("a", b"x")
    node = hand.node("a")
    hand.state.nodes.told(node)
    found = hand.node("a")
    hand.state.nodes.forget(node.id, node.lookups)
    hand.state.nodes.told(found)
    assert hand.state.nodes.get(found.id) is found
    assert hand.node("a") is found


def test_a_damaged_record_hides_no_other_file(tmp_path, caplog):
    init(f"file://{tmp_path}/store")
    options = TierOptions(ram="0", nvme="0", state_dir=str(tmp_path / "state"))
    store = open_store(Location("file", f"{tmp_path}/store", tiers=options))[0]
    for name in ("d/a", "d/b", "d/c/e"):
        verbs.save(store, name, b"x")
    (record,) = (tmp_path / "store" / ".tierfs" / "tree").rglob("b*")
    faults.flip_bit(store.objects, str(record.relative_to(tmp_path / "store")), 800)
    again = open_store(Location("file", f"{tmp_path}/store", tiers=options))[0]
    hand = Hand(again, tmp_path)
    assert hand.names("d") == ["a", "c"]
    assert "damaged" in caplog.text
    assert hand.read_file("d/a") == b"x"
    with pytest.raises(CorruptionError):
        hand.node("d/b")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_another_host_replaces_around_a_rename_is_another_inode(hand, other, around, when):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    hand.write_file("a", b"ours")
    node = hand.node("a")
    if when == "before":
        around("rename", before=lambda _, source, target: verbs.save(other, source, b"theirs"))
    else:
        around("rename", after=lambda _, source, target: verbs.save(other, target, b"theirs"))
    rename(hand, "a", "b")
    assert hand.read_file("b") == b"theirs"
    assert hand.node("b") is not node


def test_a_file_that_another_host_removes_after_a_rename_is_gone(hand, other, around):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    hand.write_file("d/a", b"ours")
    around("rename", after=lambda _, source, target: verbs.delete(other, target))
    rename(hand, "d", "e")
    assert hand.names("e") == []
    hand.write_file("b", b"x")
    rename(hand, "b", "c")
    assert hand.names() == ["e"]


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_mode_that_cannot_be_stored_is_not_shown(hand, around, name):
    hand.write_file("file", b"x")
    hand.tree.make_directory(*hand.parent("folder"), 0o755)
    node = hand.node(name)
    hand.state.nodes.told(node)
    mode = node.attributes.mode

    def fails(*_, **__):
        raise StoreError("unreachable")

    for verb in ("annotate", "annotate_directory"):
        around(verb, before=fails)
    with pytest.raises(StoreError):
        set_mode(hand, node, 0o700)
    assert hand.node(name).attributes.mode == mode


def set_mode(hand, node, mode):
    body = struct.pack("<IIQQQQQQIIIIIIII", Valid.MODE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, mode, 0, 0, 0, 0)
    ask(hand, wire.Opcode.SETATTR, node.id, body)


def read_page(hand):
    number = ask(hand, wire.Opcode.OPENDIR, 1, bytes(8))[:8]
    return ask(hand, wire.Opcode.READDIRPLUS, 1, number + struct.pack("<QIIQII", 0, 4096, 0, 0, 0, 0))


def test_a_listing_shows_the_mode_of_a_directory(hand, tmp_path):
    hand.tree.make_directory(*hand.parent("d"), 0o700)
    hand.write_file("d/a", b"x")
    for one in (hand, Hand(hand.state.store, tmp_path)):
        read_page(one)
        assert one.state.nodes.at("d").attributes.mode == 0o40700
        one.names()
        assert one.state.nodes.at("d").attributes.mode == 0o40700


def test_a_mode_that_is_set_during_a_listing_stays(hand, observed):
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    node = hand.node("d")
    hand.state.nodes.told(node)
    observed(lambda: set_mode(hand, node, 0o700))
    read_page(hand)
    assert node.attributes.mode == 0o40700


def test_the_kernel_gets_no_mode_of_a_directory_whose_marker_cannot_be_read(hand, tmp_path, observed):
    hand.tree.make_directory(*hand.parent("d"), 0o700)
    hand.write_file("e", b"x")
    one = Hand(hand.state.store, tmp_path)

    def fails():
        raise StoreError("unreachable")

    observed(fails)
    page, at, ids = bytes(read_page(one)), 0, {}
    while at < len(page):
        length = struct.unpack_from("<I", page, at + 144)[0]
        ids[page[at + 152 : at + 152 + length]] = struct.unpack_from("<Q", page, at)[0]
        at += 152 + (length + 7) // 8 * 8
    assert ids == {b".": 0, b"..": 0, b"d": 0, b"e": one.state.nodes.at("e").id}
    assert one.state.nodes.at("d").lookups == 0


def test_a_directory_that_is_dropped_during_a_listing_stays_one_inode(hand, tmp_path, observed):
    hand.tree.make_directory(*hand.parent("d"), 0o700)
    one = Hand(hand.state.store, tmp_path)
    observed(lambda: one.state.nodes.drop(one.state.nodes.at("d")))  # as at the end of another listing
    read_page(one)
    nodes = [node for node in one.state.nodes.all() if node.path == "d"]
    assert nodes == [one.state.nodes.at("d")]
    assert nodes[0].attributes.mode == 0o40700


def test_a_renamed_directory_keeps_its_mode(hand, tmp_path):
    hand.tree.make_directory(*hand.parent("d"), 0o700)
    hand.tree.make_directory(*hand.parent("d/in"), 0o711)
    hand.write_file("d/a", b"x")
    rename(hand, "d", "e")
    for one in (hand, Hand(hand.state.store, tmp_path)):
        assert [one.node(name).attributes.mode for name in ("e", "e/in")] == [0o40700, 0o40711]


@pytest.mark.parametrize("meanwhile", ["published", "removed"])
def test_a_directory_is_renamed_while_a_file_in_it_changes(hand, around, meanwhile):
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    for name in ("a", "b", "c"):
        hand.write_file(f"d/{name}", b"x")
    changed = []

    def change(store, source, target):
        if source == "d/b" and not changed:
            changed.append(source)
            if meanwhile == "removed":
                verbs.delete(store, source)
            else:
                raise ConflictError("changed in the meantime")

    around("rename", before=change)
    rename(hand, "d", "e")
    assert hand.names() == ["e"]
    assert hand.names("e") == (["a", "c"] if meanwhile == "removed" else ["a", "b", "c"])


def test_a_directory_does_not_take_the_mode_of_the_one_that_it_replaces(hand, tmp_path):
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    hand.tree.make_directory(*hand.parent("e"), 0o777)
    rename(hand, "d", "e")
    assert Hand(hand.state.store, tmp_path).node("e").attributes.mode == 0o40755


def test_a_file_published_at_the_end_of_a_directory_rename_is_renamed_too(hand, around):
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    parent, is_publishing, closed = hand.node("d"), threading.Event(), []
    commit = verbs.Writer.commit

    def slow(writer):
        commit(writer)
        is_publishing.set()
        time.sleep(0.3)

    def make():
        handle = hand.tree.make_file(parent, "new", 0o644, os.O_WRONLY)[1]
        hand.files.write(handle, 0, memoryview(b"new"))
        hand.close(handle)

    def publish(*_):
        if not closed:
            closed.append(pool.submit(make))
            is_publishing.wait(HANG_S)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(verbs.Writer, "commit", slow)
        around("remove_directory", after=publish)
        rename(hand, "d", "e")
        closed[0].result(HANG_S)
    assert (hand.names(), hand.read_file("e/new")) == (["e"], b"new")


def is_held(lock):
    """Whether another thread holds a lock."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def test_a_file_made_during_a_directory_rename_waits(hand, around):
    hand.tree.make_directory(*hand.parent("d"), 0o755)
    hand.write_file("d/a", b"a")
    made, is_locked = [], []

    def make(*_):
        if not made:
            made.append(hand.create("d/new"))
            verbs.save(hand.state.store, "d/b", b"b")  # so that the directory is not empty, and is moved again
        else:
            with ThreadPoolExecutor(1) as pool:
                is_locked.append(pool.submit(is_held, made[0].node.lock).result())

    around("rename", after=make)
    rename(hand, "d", "e")
    hand.close(made[0])
    assert is_locked == [True]
    assert (hand.names(), hand.names("e")) == (["e"], ["a", "b", "new"])


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_name_that_is_looked_up_while_it_is_renamed(hand, around, name):
    hand.tree.make_directory(*hand.parent("folder"), 0o755)
    hand.write_file("file", b"x")
    hand.write_file("folder/a", b"x")
    node, removed = hand.node(name), []
    hand.state.nodes.told(node)
    for verb in ("rename", "remove_directory"):
        around(verb, after=lambda *_: removed.append(hand.exists(name)))
    rename(hand, name, "new")
    assert removed[-1] is False
    assert hand.node("new") is node
    assert not node.attributes.is_gone
