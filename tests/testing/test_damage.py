"""Damage is planted where the caller asks for it, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierfs.errors import NotFoundError
from tierfs.objects import LocalObjects
from tierfs.testing import flip_bit, remove, swap, truncate


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    objects = LocalObjects(tmp_path)
    objects.put("a", [b"\x00\x00\x00"])
    objects.put("b", [b"other"])
    return objects


@pytest.mark.parametrize(("bit", "expected"), [(0, b"\x01\0\0"), (7, b"\x80\0\0"), (9, b"\0\x02\0"), (23, b"\0\0\x80")])
def test_one_bit_is_flipped(objects: LocalObjects, bit: int, expected: bytes) -> None:
    flip_bit(objects, "a", bit)
    assert objects.read("a", 100)[0] == expected
    flip_bit(objects, "a", bit)
    assert objects.read("a", 100)[0] == b"\0\0\0"


def test_an_object_is_cut_short(objects: LocalObjects) -> None:
    truncate(objects, "b", 2)
    assert objects.read("b", 100)[0] == b"ot"


def test_two_objects_are_swapped(objects: LocalObjects) -> None:
    swap(objects, "a", "b")
    assert (objects.read("a", 100)[0], objects.read("b", 100)[0]) == (b"other", b"\0\0\0")


def test_an_object_is_removed(objects: LocalObjects) -> None:
    remove(objects, "a")
    assert [listed.key for listed in objects.list("")] == ["b"]
    with pytest.raises(NotFoundError):
        remove(objects, "a")
