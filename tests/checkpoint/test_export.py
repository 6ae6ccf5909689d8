"""Export rebuilds the nested state from names and paths, and withstands bad paths."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tierfs.checkpoint.export import nested
from tierfs.errors import InvalidInputError


def test_strings_are_keys_and_integers_places():
    paths = {"a.b": ("a", "b"), "l.0": ("l", 0), "l.1.x": ("l", 1, "x"), "m.0": ("m", "0")}
    assert nested(dict.fromkeys(paths, 1), paths) == {"a": {"b": 1}, "l": [1, {"x": 1}], "m": {"0": 1}}


def test_without_paths_names_are_kept():
    assert nested({"a.b": 1, "c": 2}, None) == {"a.b": 1, "c": 2}
    assert nested({"a.b": 1, "c": 2}, {"c": ("x", "y")}) == {"a.b": 1, "x": {"y": 2}}


def test_values_that_are_containers_are_left_alone():
    assert nested({"a": {}, "b": [{0: 1}]}, None) == {"a": {}, "b": [{0: 1}]}


def test_a_place_far_out_makes_no_long_list():
    assert nested({"l": 1}, {"l": ("l", 10**15)}) == {"l": {10**15: 1}}
    assert nested({"a": 1, "b": 2}, {"a": ("l", 0), "b": ("l", 2)}) == {"l": {0: 1, 2: 2}}
    assert nested({"l": 1}, {"l": ("l", -1)}) == {"l": {-1: 1}}


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", "y"), "b": ("x",)},
        {"a": ("b",)},
    ],
    ids=str,
)
def test_paths_that_contradict_each_other_are_refused(paths):
    with pytest.raises(InvalidInputError, match="another value"):
        nested({"a": 1, "b": 2}, paths)
