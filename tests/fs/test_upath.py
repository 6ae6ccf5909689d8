"""universal_pathlib: paths of a store, as URLs."""

from __future__ import annotations

import pickle
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

upath = pytest.importorskip("upath")

from upath.registry import register_implementation

from tierfs.fs.upath import TierPath

register_implementation("tierfs", TierPath, clobber=True)


@pytest.fixture
def run(place):
    return upath.UPath(f"{place.url}/run")


def test_the_text_of_a_path_is_its_url(place, run):
    for path, name in ((run, "run"), (run / "a", "run/a"), ((run / "a").parent, "run"), (run.with_name("b.c"), "b.c")):
        assert isinstance(path, TierPath)
        assert str(path) == path.as_uri() == place.fs.unstrip_protocol(place / name)
        assert upath.UPath(str(path)) == path
        assert hash(upath.UPath(str(path))) == hash(path)
    assert run / "a" != run / "b"
    assert run != place.root


def test_paths_found_in_a_directory_can_be_opened_by_their_text(run):
    (run / "a").write_bytes(b"one")
    (run / "deep/b").write_bytes(b"two")
    assert sorted(str(path) for path in run.iterdir()) == [f"{run}/a", f"{run}/deep"]
    assert [upath.UPath(str(path)).read_bytes() for path in sorted(run.rglob("*")) if path.is_file()] == [
        b"one",
        b"two",
    ]
    assert str((run / "deep/b").relative_to(run)) == "deep/b"
    assert pickle.loads(pickle.dumps(run / "a")).read_bytes() == b"one"


def test_a_path_made_of_another_is_equal_to_it_in_all_parts(place, run):
    made = upath.UPath(f"{place.url}/deep/er").parent.parent / "run"
    for name in ("drive", "root", "anchor", "parts", "storage_options", "parser"):
        assert getattr(made, name) == getattr(run, name) == getattr(upath.UPath(run), name)
    assert (run.root, run.anchor, made.parents[-1].path) == ("/", "/", "/")
    assert run.storage_options == run.fs.storage_options
    assert str(made.relative_to(upath.UPath(place.url))) == "run"


def test_a_path_of_a_bucket_has_the_bucket_as_its_drive():
    for path in (upath.UPath("tierfs::s3://bucket/run/a"), upath.UPath("tierfs::s3://bucket/run") / "a"):
        assert (path.drive, path.root, path.anchor) == ("bucket", "/", "bucket/")
        assert path.parts == ("bucket/", "run", "a")


@pytest.mark.parametrize("form", [str, Path, upath.UPath], ids=["text", "path", "upath"])
def test_a_file_is_renamed_to_an_absolute_path(place, run, form):
    (run / "deep/a").write_bytes(b"one")
    moved = (run / "deep/a").rename(form((run / "b").path))
    assert (moved, moved.read_bytes()) == (run / "b", b"one")
    assert not (run / "deep/a").exists()


def test_a_named_store_keeps_its_name():
    assert str(upath.UPath("tierfs://prod/run") / "a") == "tierfs://prod/run/a"


def test_universal_pathlib_is_told_of_it():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    line = next(line for line in text.splitlines() if "TierPath" in line)
    name, _, value = line.partition(" = ")
    assert EntryPoint(name, value.strip('"'), "universal_pathlib.implementations").load() is TierPath
    assert '[project.entry-points."universal_pathlib.implementations"]\n' + line in text
