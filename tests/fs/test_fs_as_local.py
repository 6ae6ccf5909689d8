"""Calls return, raise and leave the same as those of fsspec's filesystem of local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

FILES = {
    "f": b"12345",
    "d/a.txt": b"22",
    "d/b.txt": b"333",
    "d/c.bin": b"4444",
    "d/e/a.txt": b"7",
    "d/e/deep/d.txt": b"666666",
    "other/e.txt": b"7777777",
}
PATHS = ["missing", "f", "d", "empty"]
PATTERNS = ["*", "**", "?", "d*", "d/*", "d/**", "d/e/**", "d/*.txt", "d/[ac].*", "d/[!a]*", "[do]*/*", "*/*.txt"]
PATTERNS += ["**/a.txt", "**/deep", "d/**/d.txt", "d/*/a*", "d/?/*", "d/", "*/", "**/", "f", "missing*", "missing/*"]

# Each entry is a call, with `{}` for the path. Each returns or raises as on the filesystem of local files.
LOOKS = [
    *[
        (name, (path,), {})
        for name in ("exists", "isfile", "isdir", "find", "du", "cat_file")
        for path in ("{}", "{}/")
    ],
    *[(name, ("{}",), {}) for name in ("lexists", "tail", "head", "disk_usage")],
    *[("glob", (pattern,), {}) for pattern in ("{}", "{}/*", "{}*", "{}/**")],
    *[("walk", ("{}",), options) for options in ({}, {"topdown": False}, {"on_error": "raise"})],
    *[("walk", ("{}",), {"maxdepth": depth}) for depth in (0, 1, 2, 3)],
    *[
        ("find", ("{}",), options)
        for options in ({"withdirs": True}, {"maxdepth": 0}, {"maxdepth": 1}, {"maxdepth": 2})
    ],
    *[("ls", (path,), {"detail": False}) for path in ("{}", "{}/")],
    *[("du", ("{}",), options) for options in ({"total": False}, {"maxdepth": 1})],
    *[("expand_path", (path,), {"recursive": recursive}) for path in ("{}", "{}/[ab]*") for recursive in (True, False)],
]
CHANGES = [
    *[("open", ("{}", mode), {}) for mode in ("rb", "wb", "xb", "ab", "r", "w", "x", "a")],
    *[(name, ("{}",), {}) for name in ("mkdir", "makedirs", "rmdir", "rm_file", "touch")],
    *[("pipe_file", ("{}", b"x"), options) for options in ({}, {"mode": "create"})],
    ("makedirs", ("{}",), {"exist_ok": True}),
    *[("mkdir", (path,), {"create_parents": False}) for path in ("{}", "missing/new", "d/new")],
    ("rm", ("{}",), {"recursive": True}),
    *[("mv", ("{}", "{}"), options) for options in ({}, {"recursive": True})],
    ("mv", ("{}", "{}/"), {"recursive": True}),
    ("mv", ("{}/", "{}"), {"recursive": True}),
    *[(name, ("{}", target), {"recursive": True}) for name in ("mv", "cp") for target in ("new", "empty", "d")],
    *[(name, ("{}", target), {}) for name in ("mv", "cp") for target in ("new", "d", "d/")],
    ("cp", ("{}", "d/a.txt"), {}),
    *[(name, ("{}", "new"), {}) for name in ("cp_file", "rename")],
    ("get_file", ("{}", "/dev/null"), {}),
]
# A local file cannot be copied onto itself. tierfs leaves the file alone, as buckets do.
SELF_COPIES = [(name, ("{}", "{}"), {}) for name in ("cp", "cp_file")]


class _Side:
    """A filesystem, and a directory in it."""

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self.fs, self.root = fs, root
        fs.makedirs(f"{root}/empty")
        for name, data in FILES.items():
            fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            fs.pipe_file(f"{root}/{name}", data)

    def ask(self, call: tuple[str, tuple[Any, ...], dict[str, Any]], path: str) -> Any:
        """Return the answer of a call without the directory in its names, or the builtin kind of its error."""
        name, arguments, options = call
        texts = [item.format(path) if isinstance(item, str) else item for item in arguments]
        here = [item if not isinstance(item, str) or item.startswith("/") else f"{self.root}/{item}" for item in texts]
        if name == "open":
            here[1] = texts[1]
        method = getattr(self.fs, name)
        try:
            answer = method(*here, **options)
            if name == "open":
                answer.close()
                return None
            return self._plain(list(answer) if isinstance(answer, Iterator) else answer)
        except Exception as error:
            return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")

    def left(self) -> dict[str, Any]:
        """Return the content of each file that is there, and None for each directory."""
        found = self.fs.find(self.root, withdirs=True, detail=True)
        return {
            self._plain(name): self.fs.cat_file(name) if info["type"] == "file" else None
            for name, info in found.items()
            if name != self.root
        }

    def _plain(self, answer: Any) -> Any:
        match answer:
            case str():
                return answer.replace(self.root, "")
            case dict():
                return {self._plain(key): self._plain(value) for key, value in answer.items()}
            case list():
                return sorted((self._plain(item) for item in answer), key=repr)
            case tuple():
                return tuple(self._plain(item) for item in answer)
        return answer


@pytest.fixture(scope="module")
def looked_at(module_place, tmp_path_factory):
    directory = tmp_path_factory.mktemp("as-local")
    return _Side(module_place.fs, module_place / "at"), _Side(LocalFileSystem(), f"{directory}/at")


@pytest.fixture
def changed(directory_place, tmp_path):
    (tmp_path / "at").mkdir()
    return _Side(directory_place.fs, directory_place / "at"), _Side(LocalFileSystem(), f"{tmp_path}/at")


@pytest.mark.parametrize("path", PATHS)
def test_looks_answer_as_local_files_do(looked_at, path):
    ours, local = looked_at
    answers = {repr(call): (ours.ask(call, path), local.ask(call, path)) for call in LOOKS}
    assert {call: pair for call, pair in answers.items() if pair[0] != pair[1]} == {}


def test_patterns_find_what_they_find_of_local_files(looked_at):
    for options in ({}, {"maxdepth": 1}):
        answers = {each: [side.ask(("glob", (each,), options), "") for side in looked_at] for each in PATTERNS}
        assert {pattern: pair for pattern, pair in answers.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", CHANGES, ids=repr)
def test_changes_answer_and_leave_what_local_files_do(changed, call, path):
    ours, local = changed
    assert ours.ask(call, path) == local.ask(call, path)
    assert ours.left() == local.left()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", SELF_COPIES, ids=repr)
def test_a_copy_onto_itself_changes_nothing(changed, call, path):
    ours, _ = changed
    before = ours.left()
    assert ours.ask(call, path) == ("FileNotFoundError" if path == "missing" else None)
    assert ours.left() == before
    assert ours.fs.cat_file(f"{ours.root}/f") == FILES["f"]


@pytest.mark.parametrize("mode", ["rb", "wb", "xb", "ab", "r", "w", "x", "a"])
def test_a_directory_is_not_opened(place, mode):
    place.fs.pipe(place / "d/g", b"1")
    place.fs.mkdir(place / "marked")
    nearby = place.protocol == "file" or mode in ("rb", "r")
    for name in ("d", "marked"):
        if nearby:
            with pytest.raises(FileExistsError if mode.startswith("x") else IsADirectoryError, match="directory"):
                place.fs.open(place / name, mode)
    assert place.fs.isdir(place / "d")


@pytest.mark.parametrize(("verb", "target"), [("cp_file", "d/f"), ("cp", "d/"), ("mv", "d"), ("move", "d/")])
@pytest.mark.parametrize("is_marked", [True, False])
def test_a_file_does_not_take_the_name_of_a_directory(directory_place, verb, target, is_marked):
    place = directory_place
    place.fs.pipe(place / "f", b"file")
    if is_marked:
        place.fs.makedirs(place / "d/f")
    else:
        place.fs.pipe(place / "d/f/g", b"1")
    with pytest.raises(IsADirectoryError, match="directory"):
        getattr(place.fs, verb)(place / "f", place / target)
    assert place.fs.isdir(place / "d/f")
    assert place.fs.cat(place / "f") == b"file"


def test_a_directory_of_foreign_files_is_not_opened(directory_place):
    os.makedirs(directory_place / "theirs")
    with open(directory_place / "theirs/x", "wb") as file:
        file.write(b"x")
    with pytest.raises(IsADirectoryError):
        directory_place.fs.open(directory_place / "theirs", "wb")


def test_a_file_takes_the_place_of_a_directory_that_was_deleted(place):
    place.fs.pipe({place / "d/g": b"1", place / "d/e/h": b"2"})
    place.fs.rm(place / "d", recursive=True)
    place.fs.pipe(place / "d", b"file")
    assert place.fs.cat(place / "d") == b"file"


def test_a_file_above_others_is_written_again(place):
    place.fs.pipe(place / "a", b"old")
    place.fs.pipe(place / "a/b", b"below")
    place.fs.pipe(place / "a", b"new")
    assert place.fs.cat(place / "a") == b"new"
