"""How many heaps a flusher's threads share."""

import ctypes

import pytest

from tierfs.cli import main
from tierfs.flusher.heaps import share_heaps


class Library:
    def __init__(self):
        self.said = []

    def mallopt(self, what, value):
        self.said.append((what, value))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("", "", False),
        ("MALLOC_ARENA_MAX", "7", True),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=1048576:glibc.malloc.arena_max=7", True),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=1048576", False),
    ],
)
def test_threads_share_two_heaps_unless_the_environment_says_how_many(monkeypatch, name, value, says):
    for variable in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, value)
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    share_heaps()
    assert library.said == ([] if says else [(-8, 2)])


def test_a_library_without_heaps_is_left_alone(monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    share_heaps()


def test_whoever_runs_a_flusher_has_its_threads_share_them(monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert main(["flusher", "run", "file:///nowhere", "--uuid", "none"]) != 0  # it gets no further than that
    assert library.said == [(-8, 2)]
