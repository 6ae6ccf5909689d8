"""Filesystems without a tierfs backend, on real servers: the guarantees they give, and the warnings about the rest."""

from __future__ import annotations

import contextlib
import json
import os
import socket

import fsspec
import pytest
import servers
from servers.server import free_ports

import tierfs
from tierfs.cli import main
from tierfs.errors import StoreError
from tierfs.objects import as_promised, connect, probe
from tierfs.store import verify
from tierfs.testing import ObjectTierTests

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", params=["webdav", "sftp"])
def server(request):
    with servers.running(request.param) as server:
        yield server


@pytest.fixture
def configured(server, monkeypatch):
    """Yield the server. fsspec and child processes find its options."""
    monkeypatch.setenv(f"FSSPEC_{server.protocol.upper()}", json.dumps(server.options))
    monkeypatch.setitem(fsspec.config.conf, server.protocol, dict(server.options))
    return server


@pytest.fixture
def url(configured):
    return f"{configured.protocol}://{configured.new_root()}"


@pytest.fixture(scope="module")
def kept(server):
    return probe(connect(server.protocol, server.new_root(), server.options, attempts=1)).capabilities


class TestObjects(ObjectTierTests):
    # A hundred puts of one object take two minutes if times count seconds.
    test_every_put_makes_a_version_of_its_own = None

    @pytest.fixture
    def objects(self, server, kept):
        return as_promised(connect(server.protocol, server.new_root(), server.options, attempts=1), kept)


def test_a_store_is_for_one_writer_and_reads_back_what_it_wrote(url, caplog):
    store = tierfs.init(url)
    assert store.descriptor.single_writer
    assert "conditional creates, conditional updates" in caplog.text
    assert "only one process may write" in caplog.text
    assert "read back" in caplog.text


def test_a_store_saves_overwrites_moves_lists_and_verifies(configured, url):
    store = tierfs.init(url)
    root = url.partition("://")[2]
    fs = tierfs.TierFileSystem(target_protocol=configured.protocol, target_options=configured.options)
    content = os.urandom(3_000_000)  # several blocks; SFTP's client writes a megabyte per second
    fs.pipe_file(f"{root}/run/data.bin", b"before")
    fs.pipe_file(f"{root}/run/data.bin", content)
    fs.pipe_file(f"{root}/run/.metadata", b"metadata")
    fs.wait(root, "object", 60)
    assert fs.cat_file(f"{root}/run/data.bin", start=1_000_000, end=2_000_000) == content[1_000_000:2_000_000]
    fs.mv(f"{root}/run/data.bin", f"{root}/run/moved.bin")
    fs.wait(root, "object", 60)
    assert fs.ls(f"{root}/run", detail=False) == [f"{root}/run/.metadata", f"{root}/run/moved.bin"]
    assert verify(store).damage == []
    elsewhere = tierfs.TierFileSystem(
        target_protocol=configured.protocol, target_options=configured.options, ack="object", ram="0", nvme="0"
    )
    assert elsewhere.cat_file(f"{root}/run/moved.bin") == content


@pytest.mark.parametrize("has_store", [False, True], ids=["no store", "a store"])
def test_a_probe_says_which_promises_are_not_kept(url, has_store, capsys):
    if has_store:
        tierfs.init(url)
    assert main(["probe", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    marks = {mark: [line for line in lines if line.startswith(mark)] for mark in ("not kept ", "kept ")}
    for name in ("conditional create ", "conditional update ", "checksums ", "atomic puts "):
        assert any(f" {name}" in line for line in marks["not kept "]), name
    for name in ("list-after-write", "ranged reads", "reads pinned to a version"):
        assert any(name in line for line in marks["kept "]), name
    assert "writers   one process at a time" in lines
    assert "writes    read back" in lines
    assert any(line.startswith("store ") and ("none at" in line) != has_store for line in lines)


def test_a_directory_removed_by_others_is_made_again(server):
    root = server.new_root()
    objects = connect(server.protocol, root, server.options, attempts=1)
    objects.put("run/a", [b"something"])
    fsspec.filesystem(server.protocol, **server.options).rm(root, recursive=True)
    with contextlib.suppress(StoreError):  # WebDAV's client creates it at once by itself
        objects.put("run/a", [b"something"])
    objects.put("run/a", [b"something"])
    assert objects.read("run/a", 100)[0] == b"something"


def test_a_server_that_is_not_there_may_come_back(server):
    [port] = free_ports(1)
    with pytest.raises(StoreError) as caught:
        connect(server.protocol, "run", server.options_at(port), attempts=1).head("a")
    assert caught.value.transient


def test_a_connection_that_was_lost_is_made_anew():
    with servers.running("sftp") as server:
        root = server.new_root()
        objects = connect("sftp", root, server.options)
        objects.put("a", [b"before"])
        fsspec.filesystem("sftp", **server.options).client.get_transport().sock.shutdown(socket.SHUT_RDWR)
        objects.put("a", [b"afterwards"])
        assert objects.read("a", 100)[0] == b"afterwards"


def test_credentials_that_ssh_does_not_accept_are_told():
    with (
        servers.running("sftp") as server,
        pytest.raises(StoreError, match="not accepted") as caught,
    ):
        connect("sftp", server.new_root(), {**server.options, "username": "nobody"}, attempts=1).head("a")
    assert not caught.value.transient
