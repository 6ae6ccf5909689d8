"""Errors, and the URLs in what tierfs shows: no password of a URL is in them."""

import importlib
import logging
import pickle

import fsspec
import pytest

import tierfs
from tierfs.errors import NotFoundError, without_passwords
from tierfs.objects.backends.fsspec import FsspecObjects
from tierfs.session import parse_url

HTTP = "http://me:hidden@word@host:8080/store"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:hidden@host/run", "sftp://me:***@host/run"),
        ("'tierfs::sftp://me:hid@den@host:22/run' is gone", "'tierfs::sftp://me:***@host:22/run' is gone"),
        ("sftp://me@corp.org:hidden@host:22/run", "sftp://me@corp.org:***@host:22/run"),
        ("http://:hidden@host and ftp://me:hid?#den@host", "http://:***@host and ftp://me:***@host"),
        ("http://host:8080/me:you@there", "http://host:8080/me:you@there"),
        ("abfs://container@account/run:1@2", "abfs://container@account/run:1@2"),
        ("s3://arn:aws:s3:eu:1:accesspoint/run@2", "s3://arn:aws:s3:eu:1:accesspoint/run@2"),
        ("tierfs://NAME/a:b@c", "tierfs://NAME/a:b@c"),
        ("/data/me:you@host", "/data/me:you@host"),
    ],
)
def test_only_the_password_of_a_url_is_hidden(text, shown):
    assert without_passwords(text) == shown
    error = NotFoundError(text, path=text)
    assert (str(error), error.path) == (shown, shown)
    assert str(pickle.loads(pickle.dumps(error))) == shown


def test_a_store_is_shown_without_its_password():
    location = parse_url(HTTP)
    assert location.path == HTTP
    assert location.url == "http://me:***@host:8080/store"
    assert "hidden" not in repr(FsspecObjects(fsspec.filesystem("http"), HTTP))


@pytest.mark.parametrize("room", ["store", "dcp", "train", "flush"])
def test_a_log_has_no_password_of_a_url(room, caplog):
    importlib.import_module("tierfs.train.run")
    logging.getLogger(f"tierfs.{room}").error("%s is skipped: %s", f"tierfs::{HTTP}", OSError(HTTP))
    assert caplog.messages == ["tierfs::http://me:***@host:8080/store is skipped: http://me:***@host:8080/store"]


def test_a_filesystem_returns_urls_that_can_be_opened():
    fs = tierfs.TierFileSystem(target_protocol="http")
    assert fs.unstrip_protocol(HTTP) == f"tierfs::{HTTP}"
