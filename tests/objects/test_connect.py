"""The protocol of a URL selects the tier, and a client is imported only when it is needed."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from support.forked import answer_of

from tierfs.errors import InvalidInputError, NotFoundError, StoreError
from tierfs.objects import (
    FsspecObjects,
    LimitedObjects,
    LocalObjects,
    MeasuredObjects,
    ObjectTier,
    RetryingObjects,
    connect,
)
from tierfs.objects.backends import memory


class AuthenticationException(Exception):
    """Named like an error that paramiko raises before a filesystem exists."""


class Cloud(AsyncFileSystem):  # type: ignore[misc]
    """Stands for the filesystem of some cloud."""

    protocol = "testcloud"
    cachable = False

    def __init__(self, token: str = "", **options: object) -> None:
        super().__init__(**options)
        if token == "not accepted":
            raise AuthenticationException("Authentication failed.")
        if token == "refused":
            raise ValueError("the token is no token")
        self.token = token


@pytest.fixture(autouse=True)
def cloud() -> None:
    fsspec.register_implementation("testcloud", Cloud, clobber=True)


def _backend(objects: MeasuredObjects) -> ObjectTier:
    assert isinstance(objects.inner, RetryingObjects)
    assert isinstance(objects.inner.inner, LimitedObjects)
    return objects.inner.inner.inner


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_directory_has_its_own_tier(tmp_path: Path, protocol: str) -> None:
    backend = _backend(connect(protocol, str(tmp_path), {"auto_mkdir": True}))
    assert isinstance(backend, LocalObjects)
    assert backend.root == tmp_path


def test_every_other_protocol_is_fsspec_s() -> None:
    backend = _backend(connect("testcloud", "bucket/run", {"token": "secret"}))
    assert isinstance(backend, FsspecObjects)
    assert backend.fs.token == "secret"
    assert "secret" not in repr(backend)


def test_listings_are_never_remembered() -> None:
    backend = _backend(connect("testcloud", "bucket/run", {"use_listings_cache": True}))
    assert isinstance(backend, FsspecObjects)
    assert backend.fs.dircache.use_listings_cache is False


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="nosuchprotocol://"):
        connect("nosuchprotocol", "bucket", {})


def test_options_that_the_filesystem_refuses_are_named() -> None:
    with pytest.raises(InvalidInputError, match="the token is no token"):
        connect("testcloud", "bucket", {"token": "refused"})
    with pytest.raises(InvalidInputError, match="asynchronous"):
        connect("testcloud", "bucket", {"asynchronous": True})


def test_a_filesystem_that_connects_at_once_and_fails_raises_an_error_of_ours() -> None:
    with pytest.raises(
        StoreError, match="testcloud://: the credentials are missing, expired or not accepted"
    ) as caught:
        connect("testcloud", "bucket", {"token": "not accepted"})
    assert not caught.value.transient


@pytest.mark.parametrize(("protocol", "extra"), [("s3a", "s3"), ("gs", "gcs"), ("az", "azure")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, protocol: str, extra: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidInputError, match=rf"pip install 'tierfs\[{extra}\]'"):
        connect(protocol, "bucket", {})


def test_a_missing_package_without_an_extra_is_named_as_fsspec_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> type:
        raise ImportError('SFTPFileSystem requires "paramiko" to be installed')

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(InvalidInputError, match="paramiko"):
        connect("sftp", "data", {})


def test_importing_the_package_imports_no_client() -> None:
    code = "import sys, tierfs.objects; print([m for m in sys.argv[1:] if m in sys.modules])"
    clients = ["s3fs", "gcsfs", "adlfs", "aiohttp", "botocore", "obstore", "torch", "numpy", "pytest"]
    printed = subprocess.run([sys.executable, "-c", code, *clients], check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == "[]"


def test_a_forked_child_is_not_held_up_by_its_parent_s_requests() -> None:
    # A child has none of its parent's other threads, and must not wait for locks that they hold.
    connect("memory", "/test-fork", {}).put("a", [b"something"])
    with memory._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests may still run
        assert answer_of(lambda: connect("memory", "/test-fork", {}).head("a").size) == "9"


def test_a_cloud_is_connected_to_once_for_all_directories_that_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    backend = importlib.import_module("tierfs.objects.backends.s3")
    opened: list[str] = []
    closed: list[str] = []

    class Session:
        endpoint = "http://cloud"

        def __init__(self, options: Mapping[str, object]) -> None:
            self.name = str(options["name"])
            opened.append(self.name)

        def call(self, method: str, **_: object) -> None:
            raise FileNotFoundError(method)

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(backend, "connect", Session)
    for name in ("first", "second"):
        for path in ("bucket/a/b/c", "bucket/a/b", "bucket/a", "bucket"):
            with pytest.raises(NotFoundError):
                connect("s3", path, {"name": name}).head("store.json")
            gc.collect()
        assert opened[-1] == name
    assert opened == ["first", "second"]
    assert closed == ["first"]
