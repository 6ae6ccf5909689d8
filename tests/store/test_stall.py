"""Pending files while nothing reaches the object tier: reports, warnings, and waits after it is back."""

import threading

import pytest
from support.tiered import Host
from support.waiting import HANG_S, until

from tierfs.errors import CapacityError, ReadOnlyError, StoreError
from tierfs.host.pending.levels import Level
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.store import load, save, status, wait


class Puts(MemoryObjects):
    """An object tier whose puts do what ``refuse`` does."""

    def __init__(self, root):
        super().__init__(root)
        self.refuse = lambda: None

    def put(self, key, data, **how):
        self.refuse()
        return super().put(key, data, **how)


@pytest.fixture
def host(tmp_path, root, descriptor):
    host = Host(tmp_path, Puts(root), descriptor)
    yield host
    host.objects.refuse = lambda: None
    host.close()


def refuse_with(error):
    def refuse():
        raise error

    return refuse


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_stall_is_reported_and_warned_of_rarely(host, monkeypatch, caplog, is_silent):
    monkeypatch.setattr("tierfs.flusher.state.STALL_S", 0.3)
    monkeypatch.setattr("tierfs.host.write.ahead.HOUSEKEEPING_S", 0.05)
    monkeypatch.setattr("tierfs.host.write.ahead.STALL_ROUNDS", 1)
    answers = threading.Event()
    unreachable = refuse_with(StoreError("no connection", transient=True))
    host.objects.refuse = (lambda: answers.wait(HANG_S)) if is_silent else unreachable

    def warnings():
        return [each for each in caplog.messages if each.startswith("nothing has reached the object tier")]

    save(host.store, "a", b"x" * 100_000)
    until(lambda: len(warnings()) == 3)  # after 0.3, 0.6 and 1.2 s
    assert "1 files wait" in warnings()[0]
    report = status(host.store)
    assert report["stalled_s"] >= 1.2
    assert report["failing_files"] == 1
    assert report["errors"][0]["path"] == "a"
    assert ("nothing has reached" if is_silent else "no connection") in report["errors"][0]["message"]
    answers.set()
    host.objects.refuse = lambda: None
    wait(host.store, "a", Level.OBJECT)
    assert len(warnings()) <= 4
    report = status(host.store)
    assert (report["stalled_s"], report["errors"]) == (0, [])


@pytest.mark.parametrize("error", [ReadOnlyError("denied"), CapacityError("full"), StoreError("no such bucket")])
def test_a_wait_tries_again_before_it_repeats_an_error(host, monkeypatch, error):
    for bound in ("RETRY_S_MIN", "RETRY_S_MAX"):
        monkeypatch.setattr(f"tierfs.flusher.state.{bound}", 30.0)
    host.objects.refuse = refuse_with(error)
    save(host.store, "a", b"x" * 100_000)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            wait(host.store, "a", Level.OBJECT)
    host.objects.refuse = lambda: None
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == b"x" * 100_000
