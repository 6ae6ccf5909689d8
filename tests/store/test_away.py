"""An object tier that does not answer is not waited for by those who can do without."""

import threading
import time
from types import SimpleNamespace

import pytest

from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.errors import NotFoundError, StoreError
from tierfs.objects.memory import MemoryObjects
from tierfs.store.away import AWAY_S, KnownStores, ask_briefly, within
from tierfs.store.create import create_store
from tierfs.store.transfers import WORKERS, transfers


class Tiers:
    away_until_s = 0.0


class Store:
    def __init__(self):
        self.tiers, self.clock = Tiers(), ManualClock()
        self.descriptor = SimpleNamespace(endpoint=SimpleNamespace(host_local=False))


def fail():
    raise StoreError("no connection", transient=True)


def test_an_answer_in_time_is_returned_and_an_error_raised():
    assert within(5, lambda: 7) == 7
    with pytest.raises(NotFoundError):
        within(5, lambda: (_ for _ in ()).throw(NotFoundError("gone")))


def test_looks_that_hang_keep_no_chunk_from_being_moved():
    release = threading.Event()
    try:
        for _ in range(WORKERS + 1):
            with pytest.raises(StoreError, match="did not answer within") as raised:
                within(0.01, release.wait)
            assert raised.value.transient
        begin = time.monotonic()
        assert transfers().submit(lambda value: value, 1).result(10) == 1
        assert time.monotonic() - begin < 10
    finally:
        release.set()


def test_a_tier_that_is_away_is_not_asked_again_for_a_while():
    store, asked = Store(), []
    with pytest.raises(StoreError, match="no connection"):
        ask_briefly(store, fail)
    with pytest.raises(StoreError, match="a moment ago"):
        ask_briefly(store, lambda: asked.append(1))
    assert not asked
    store.clock.sleep(AWAY_S)
    ask_briefly(store, lambda: asked.append(1))
    assert asked


def test_an_answer_that_is_an_error_does_not_make_it_away():
    store = Store()
    with pytest.raises(NotFoundError):
        ask_briefly(store, lambda: (_ for _ in ()).throw(NotFoundError("gone")))
    assert ask_briefly(store, lambda: 1) == 1


def test_a_store_is_known_by_its_url_until_its_note_is_damaged(tmp_path, caplog):
    descriptor, _ = create_store(MemoryObjects("/away"), "x://a", digest=DigestKind.XXH3_128, random_bytes=bytes(16))
    known = KnownStores(tmp_path / "state")
    assert known.find("x://a") is None
    known.remember("x://a", descriptor, ("a", "b"))
    assert KnownStores(tmp_path / "state").find("x://a") == (descriptor, ("a", "b"))
    assert KnownStores(tmp_path / "state", "of another account").find("x://a") is None
    assert known.find("x://b") is None
    (note,) = (tmp_path / "state" / "known").iterdir()
    note.write_text("{")
    assert known.find("x://a") is None
    assert "of no use" in caplog.text
