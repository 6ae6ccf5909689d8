"""Counts by path let readers skip queries of the index."""

from __future__ import annotations

import os

import pytest

from tierfs.host.nvme.index import path_counts
from tierfs.host.nvme.index.path_counts import PathCounter, PathCounts


@pytest.fixture
def files(tmp_path):
    index = tmp_path / "nvme.db"
    index.write_bytes(b"an index")
    return tmp_path / "nvme.paths", index


@pytest.fixture
def counts(files):
    return PathCounts(*files)


@pytest.fixture
def counter(files):
    counter = PathCounter(*files)
    counter.renew([])
    return counter


def test_counts_without_a_writer_are_uncertain(counts):
    assert not counts.is_clear("run/a")


def test_a_path_and_all_above_it_are_taken_while_it_is_counted(counter, counts):
    counter.add(["run/step/a", "run/step/b"], 1)
    assert not any(map(counts.is_clear, ("run/step/a", "run/step/b", "run/step", "run", "")))
    assert counts.is_clear("run/step/c")
    assert counts.is_clear("run/s")
    counter.add(["run/step/a"], -1)
    assert counts.is_clear("run/step/a")
    assert not any(map(counts.is_clear, ("run/step/b", "run/step", "run", "")))


def test_two_paths_that_share_a_count(counter, counts, monkeypatch):
    monkeypatch.setattr(path_counts, "COUNTS", 1)
    counter.add(["a"], 1)
    assert not counts.is_clear("b")
    counter.add(["a"], -1)
    assert counts.is_clear("b")


def test_a_new_count_replaces_the_old(counter, counts):
    counter.add(["a"], 1)
    counter.renew(["b"])
    assert counts.is_clear("a")
    assert not counts.is_clear("b")


def test_an_index_that_was_replaced_is_asked(counter, counts, files):
    assert counts.is_clear("a")
    new = files[1].with_name("new")
    new.write_bytes(b"another")
    os.replace(new, files[1])
    assert not counts.is_clear("a")
    counter.renew([])
    assert counts.is_clear("a")


def test_counts_of_an_earlier_run_of_the_kernel_say_nothing(counter, counts, monkeypatch):
    assert counts.is_clear("a")
    monkeypatch.setattr(path_counts, "_BOOT", "0" * 32)
    assert not counts.is_clear("a")


def test_names_that_are_no_valid_unicode_are_counted(counter, counts):
    counter.add(["a/\udcff"], 1)
    assert not counts.is_clear("a/\udcff")


def test_without_room_for_the_file_the_index_is_asked(files, counts, monkeypatch):
    def full(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    counter = PathCounter(*files)
    counter.renew([])
    counter.add(["a"], 1)
    assert not counts.is_clear("b")
