"""Two listings find the names of directories, including those with foreign files only."""

import uuid

import fsspec
import pytest

import tierfs
from tierfs.errors import NotFoundError
from tierfs.session import open_store, parse_url
from tierfs.store import annotate_directory, delete, directories_in, save
from tierfs.store.tree import directory


@pytest.fixture
def store():
    url = f"memory://{uuid.uuid4().hex}"
    tierfs.init(url)
    return open_store(parse_url(url))[0]


def test_directories_are_named_and_files_are_not(store):
    for path in ("run/step_10/a", "run/step_9/x/y", "run/file", "top"):
        save(store, path, b"data")
    fsspec.filesystem("memory").pipe(f"{store.url}/run/foreign/b", b"data")
    assert directories_in(store, "run") == ["foreign", "step_10", "step_9"]
    assert directories_in(store, "") == ["run"]
    assert directories_in(store, "nothing") == []


def test_a_directory_whose_files_were_deleted_may_still_be_named(store):
    save(store, "run/step_1/a", b"data")
    delete(store, "run/step_1/a")
    assert directories_in(store, "run") == ["step_1"]


def test_attributes_of_a_directory_that_disappears_are_an_error(store, monkeypatch):
    monkeypatch.setattr(directory, "make_directory", lambda *_, **__: None)  # as if another host removed it at once
    with pytest.raises(NotFoundError, match="was removed in the meantime"):
        annotate_directory(store, "run", {"mode": 0o700})
