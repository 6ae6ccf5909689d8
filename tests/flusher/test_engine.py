"""The engine's answers distinguish a client's mistakes from the flusher's own."""

import threading
from types import SimpleNamespace

import pytest

from tierfs.errors import InvalidInputError
from tierfs.flusher.engine import FlushEngine


class BrokenFlusher:
    """A flusher with a bug in every part."""

    nvme = None

    def __getattr__(self, name):
        raise KeyError(name)

    def broken(self, *_about, **_more):
        raise TypeError("a bug")

    report = wait = discard = report_damage = hand_over = nudge = broken


@pytest.fixture
def engine():
    engine = FlushEngine(BrokenFlusher)
    engine._started = BrokenFlusher()
    return engine


@pytest.fixture
def peer():
    return SimpleNamespace(gone=threading.Event())


ASKED = {
    "hello": {"options": {}},
    "draft": {},
    "wait": {"level": "object", "path": "a"},
    "status": {},
    "backfill": {"slots": []},
    "ahead": {"slots": [["00" * 16, 1, 2]], "length": 3},
    "quarantine": {"name": "00", "length": 3},
    "report_damage": {"key": "a"},
    "discard": {"path": "a"},
}


@pytest.mark.parametrize("do", ASKED)
def test_a_bug_is_not_taken_for_bad_arguments(engine, peer, do):
    with pytest.raises((KeyError, TypeError)):
        engine.handle(do, ASKED[do], peer)


@pytest.mark.parametrize("do", [do for do in ASKED if do not in {"hello", "draft", "status"}])
def test_bad_arguments_are_told_of_before_anything_is_done(engine, peer, do):
    with pytest.raises(InvalidInputError, match="bad arguments: KeyError"):
        engine.handle(do, {}, peer)


def test_an_unknown_request_is_refused(engine, peer):
    with pytest.raises(InvalidInputError, match="unknown flusher request 'fly'"):
        engine.handle("fly", {}, peer)
