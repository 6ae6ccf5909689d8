"""A new file goes to a writer while it is written, and is published with exactly the written bytes."""

import errno
import os
import random

import pytest
from support.mount_hand import Hand

from tierfs import store as verbs
from tierfs.errors import CapacityError, ConflictError, NotFoundError, StoreError
from tierfs.host.write.writer import SlabWriter
from tierfs.mount import overlay
from tierfs.mount.wire import SetAttr, Valid
from tierfs.session import TierOptions, init, open_store
from tierfs.session.url import Location
from tierfs.store import Writer
from tierfs.store.chunks import store_chunk
from tierfs.store.write import sink

MIB = 1 << 20
DATA = random.Random(9).randbytes(6 * MIB + 77)


@pytest.fixture(autouse=True)
def all_are_given_back():
    yield
    taken = [overlay.ahead_free.acquire(blocking=False) for _ in range(overlay.AHEAD_MAX)]
    for _ in filter(None, taken):
        overlay.ahead_free.release()
    assert all(taken)


def write(hand, handle, data, start=0):
    for offset in range(0, len(data), MIB // 2):
        hand.files.write(handle, start + offset, memoryview(data[offset : offset + MIB // 2]))


def is_ahead(handle):
    return handle.node.staged.is_ahead


@pytest.fixture
def made(monkeypatch):
    """The calls of `Writer.write`: the writer and the number of bytes."""
    taken = []
    real = Writer.write

    def count(self, data):
        taken.append((self, len(data)))
        return real(self, data)

    monkeypatch.setattr(Writer, "write", count)
    return taken


def test_all_of_a_file_is_stored_before_it_is_closed(hand, made):
    handle = hand.create("a")
    write(hand, handle, DATA)
    assert sum(length for _, length in made) == len(DATA)
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == DATA
    assert [length for _, length in made] == [2 * MIB] + [MIB // 2] * 8 + [77]
    assert len({id(writer) for writer, _ in made}) == 1
    assert verbs.stat(hand.state.store, "a").manifest.metadata["posix"]["mode"] == 0o644


@pytest.mark.parametrize("change", ["write", "truncate", "rename", "empty", "read", "hole"])
def test_a_file_changed_after_storing_is_stored_again(hand, change):
    model = bytearray(DATA)
    handle = hand.create("a")
    write(hand, handle, DATA)
    assert is_ahead(handle)
    if change == "write":
        hand.files.write(handle, MIB, memoryview(b"changed"))
        model[MIB : MIB + 7] = b"changed"
    elif change == "rename":
        hand.tree.rename(*hand.parent("a"), *hand.parent("b"), 0)
    elif change == "read":
        assert bytes(hand.files.read(handle, 3 * MIB - 5, 99)) == DATA[3 * MIB - 5 :][:99]
        assert not is_ahead(handle)
        write(hand, handle, b"more", len(DATA))
        model += b"more"
    elif change == "hole":
        write(hand, handle, b"behind", 9 * MIB)
        model += bytes(9 * MIB - len(DATA)) + b"behind"
    else:
        length = 0 if change == "empty" else 3 * MIB + 5
        hand.files.set_attributes(handle.node, SetAttr(Valid.SIZE, 0, length, 0, 0, 0, 0))
        del model[length:]
        write(hand, handle, DATA[: 3 * MIB], length)
        model += DATA[: 3 * MIB]
    hand.close(handle)
    assert verbs.load(hand.state.store, "b" if change == "rename" else "a") == model


def test_a_file_that_is_removed_while_it_is_stored_leaves_nothing(hand):
    handle = hand.create("a")
    write(hand, handle, DATA)
    hand.tree.remove_file(hand.state.nodes.root, "a")
    write(hand, handle, b"more", len(DATA))
    assert bytes(hand.files.read(handle, len(DATA) - 9, 99)) == DATA[-9:] + b"more"
    hand.close(handle)
    assert hand.names() == []


def test_a_file_that_another_host_made_meanwhile_stands(hand, other):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    handle = hand.create("a")
    write(hand, handle, DATA)
    assert is_ahead(handle)
    verbs.save(other, "a", b"theirs")
    with pytest.raises(ConflictError):
        hand.files.flush(handle)
    with pytest.raises(ConflictError):
        hand.files.release(handle)
    assert hand.read_file("a") == b"theirs"


def test_a_store_that_fails_at_first_is_told_when_the_file_is_closed(hand, monkeypatch):
    def fail(self, data):
        raise CapacityError("no room")

    monkeypatch.setattr(Writer, "write", fail)
    handle = hand.create("a")
    write(hand, handle, DATA)
    with pytest.raises(CapacityError):
        hand.files.flush(handle)
    monkeypatch.undo()
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == DATA


@pytest.mark.parametrize("there_is_one", [False, True])
@pytest.mark.parametrize("when", ["write", "commit"])
def test_a_store_that_fails_later_is_told_each_time_and_nothing_is_published(hand, monkeypatch, when, there_is_one):
    if there_is_one:
        hand.write_file("a", b"before")
    handle = hand.create("a") if not there_is_one else hand.open("a", os.O_WRONLY | os.O_TRUNC)
    write(hand, handle, DATA)
    assert is_ahead(handle)

    def fail(*_):
        raise StoreError("the object tier is gone")

    monkeypatch.setattr(Writer, "_take" if when == "write" else "_manifest", fail)
    if when == "write":
        with pytest.raises(StoreError, match="is gone"):
            write(hand, handle, b"more", len(DATA))
    with pytest.raises(StoreError, match="is gone"):
        hand.files.sync(handle)
    monkeypatch.undo()
    for again in (
        lambda: hand.files.sync(handle),
        lambda: hand.files.read(handle, 0, 9),
        lambda: write(hand, handle, b"x", 7),
        lambda: hand.files.flush(handle),
        lambda: hand.files.release(handle),
    ):
        with pytest.raises(StoreError, match="is gone"):
            again()
    if there_is_one:
        assert hand.read_file("a") == b"before"
    else:
        with pytest.raises(NotFoundError):
            verbs.load(hand.state.store, "a")


def test_a_chunk_that_is_lost_while_a_file_is_read_is_told(hand, monkeypatch):
    real = store_chunk if hand.state.store.tiers is None else SlabWriter.seal_chunk
    failures = iter([StoreError("the object tier is gone")])

    def fail_once(*arguments, **options):
        for error in failures:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(sink, "store_chunk", fail_once)
    monkeypatch.setattr(SlabWriter, "seal_chunk", fail_once)
    handle = hand.create("a")
    write(hand, handle, DATA * 4)
    assert is_ahead(handle)
    for _ in range(2):
        with pytest.raises(StoreError, match="is gone"):
            hand.files.read(handle, 0, 9)
    with pytest.raises(StoreError, match="is gone"):
        hand.files.flush(handle)
    with pytest.raises(StoreError, match="is gone"):
        hand.files.release(handle)
    assert hand.names() == []


def test_a_file_that_was_renamed_there_and_back_is_published(hand):
    hand.write_file("a", b"before")
    handle = hand.open("a", os.O_WRONLY | os.O_TRUNC)
    write(hand, handle, DATA)
    assert is_ahead(handle)
    for old, new in (("a", "b"), ("b", "a")):
        hand.tree.rename(*hand.parent(old), *hand.parent(new), 0)
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == DATA


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_local_disk_that_is_full_leaves_what_was_written(hand, monkeypatch, goes_on):
    handle = hand.create("a")
    write(hand, handle, DATA)
    assert is_ahead(handle)

    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(overlay.OverlaidInode, "_write_local", full)
    for change in (lambda: hand.files.write(handle, 5, memoryview(b"x")), lambda: hand.files.read(handle, 5, 5)):
        with pytest.raises(OSError, match="no room"):
            change()
    write(hand, handle, DATA, len(DATA))
    if goes_on:
        monkeypatch.undo()
        hand.files.write(handle, 5, memoryview(b"x"))
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == (DATA[:5] + b"x" + DATA[6:] if goes_on else DATA) + DATA


def test_a_file_that_is_emptied_needs_no_room_on_the_local_disk(hand, monkeypatch):
    handle = hand.create("a")
    write(hand, handle, DATA)
    assert is_ahead(handle)

    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(overlay.OverlaidInode, "_write_local", full)
        hand.files.set_attributes(handle.node, SetAttr(Valid.SIZE, 0, 0, 0, 0, 0, 0))
    write(hand, handle, DATA[5:])
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == DATA[5:]


def test_files_beyond_the_bound_are_stored_when_they_are_closed(hand):
    handles = [hand.create(f"f{number}") for number in range(overlay.AHEAD_MAX + 2)]
    for handle in handles:
        write(hand, handle, DATA)
    assert sum(map(is_ahead, handles)) == overlay.AHEAD_MAX
    for handle in handles:
        hand.close(handle)
    assert all(verbs.load(hand.state.store, f"f{number}") == DATA for number in range(len(handles)))


def test_files_that_stay_open_leave_a_small_ram_tier_to_others(tmp_path):
    init(f"file://{tmp_path}/store")
    tiers = TierOptions(ram="64MiB", nvme="0", state_dir=str(tmp_path / "state"), ack="staged", timeout=2)
    store = open_store(Location("file", f"{tmp_path}/store", tiers=tiers))[0]
    hand = Hand(store, tmp_path)
    handles = [hand.create(f"f{number}") for number in range(4)]
    for start in range(0, len(DATA) * 3, len(DATA)):
        for handle in handles:
            write(hand, handle, DATA, start)
    for handle in handles:
        hand.close(handle)
    assert all(verbs.load(store, f"f{number}") == DATA * 3 for number in range(4))
    assert store.tiers.counters["mount_written_twice"] == 4


def test_a_file_that_grows_slowly_is_stored_when_it_is_closed(hand):
    handles = {seconds: hand.create(f"after {seconds} s") for seconds in (1, 30)}
    for seconds, handle in handles.items():
        write(hand, handle, DATA[:MIB])
        handle.node.staged.begun_s -= seconds
        write(hand, handle, DATA[MIB:], MIB)
    assert [is_ahead(handle) for handle in handles.values()] == [True, False]
    for seconds, handle in handles.items():
        hand.close(handle)
        assert verbs.load(hand.state.store, f"after {seconds} s") == DATA


def test_random_writes_while_it_is_stored_end_up_where_they_belong(hand):
    chance = random.Random(3)
    for name in ("a", "b", "c"):
        model = bytearray()
        handle = hand.create(name)
        for _ in range(40):
            offset = len(model) if chance.random() < 0.9 else chance.randrange(len(model) + 1)
            data = chance.randbytes(chance.randrange(1, MIB // 2))
            model[offset : offset + len(data)] = data
            hand.files.write(handle, offset, memoryview(data))
        hand.close(handle)
        assert verbs.load(hand.state.store, name) == bytes(model)
