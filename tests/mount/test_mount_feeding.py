"""A new file is stored while it is being written, and what is published is what was written all the same."""

import random
import threading

import pytest

from tierfs import store as verbs
from tierfs.errors import CapacityError, ConflictError
from tierfs.mount import feeding
from tierfs.mount.wire import SetAttr, Valid
from tierfs.store import Writer

MIB = 1 << 20
DATA = random.Random(9).randbytes(6 * MIB + 77)


def write(hand, handle, data, start=0):
    for offset in range(0, len(data), MIB // 2):
        hand.files.write(handle, start + offset, memoryview(data[offset : offset + MIB // 2]))


def wait_until_fed(handle, count):
    found = handle.node.staged.feeding
    deadline = threading.Event()
    for _ in range(500):
        if found._fed >= count:
            return
        deadline.wait(0.01)
    raise AssertionError(f"{found._fed} of {count} bytes")


@pytest.fixture
def made(monkeypatch):
    """How many bytes each writer took."""
    taken = []
    real = Writer.write

    def count(self, data):
        taken.append((self, len(data)))
        return real(self, data)

    monkeypatch.setattr(Writer, "write", count)
    return taken


def test_most_of_a_file_is_stored_before_it_is_closed(hand, made):
    handle = hand.create("a")
    write(hand, handle, DATA)
    wait_until_fed(handle, 6 * MIB)
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == DATA
    assert [length for _, length in made] == [MIB] * 6 + [77]
    assert len({id(writer) for writer, _ in made}) == 1
    assert verbs.stat(hand.state.store, "a").manifest.metadata["posix"]["mode"] == 0o644


@pytest.mark.parametrize("change", ["write", "truncate", "rename", "empty"])
def test_what_is_changed_after_it_was_stored_is_stored_again(hand, change):
    model = bytearray(DATA)
    handle = hand.create("a")
    write(hand, handle, DATA)
    wait_until_fed(handle, 6 * MIB)
    if change == "write":
        hand.files.write(handle, MIB, memoryview(b"changed"))
        model[MIB : MIB + 7] = b"changed"
    elif change == "rename":
        hand.tree.rename(*hand.parent("a"), *hand.parent("b"), 0)
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
    found = handle.node.staged.feeding
    hand.tree.remove_file(hand.state.nodes.root, "a")
    hand.close(handle)
    assert found._ended.wait(10)
    assert hand.names() == []
    assert feeding._underway.acquire(blocking=False)
    feeding._underway.release()


def test_a_file_that_another_host_made_meanwhile_stands(hand, other):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    handle = hand.create("a")
    write(hand, handle, DATA)
    wait_until_fed(handle, 6 * MIB)
    verbs.save(other, "a", b"theirs")
    with pytest.raises(ConflictError):
        hand.files.flush(handle)
    with pytest.raises(ConflictError):
        hand.files.release(handle)
    assert hand.read_file("a") == b"theirs"


def test_a_store_that_fails_meanwhile_is_told_when_the_file_is_closed(hand, monkeypatch):
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


def test_files_beyond_the_bound_are_stored_when_they_are_closed(hand):
    handles = [hand.create(f"f{number}") for number in range(feeding.FEEDING_MAX + 2)]
    for handle in handles:
        write(hand, handle, DATA)
    assert sum(handle.node.staged.feeding is not None for handle in handles) == feeding.FEEDING_MAX
    for handle in handles:
        hand.close(handle)
    assert all(verbs.load(hand.state.store, f"f{number}") == DATA for number in range(len(handles)))


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
