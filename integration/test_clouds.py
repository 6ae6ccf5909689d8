"""All of tierfs on each cloud's server: the object tier, the filesystem, DCP, and the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import fsspec
import pytest
import servers
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

import tierfs
from tierfs.objects import as_promised, connect, probe
from tierfs.session import open_store, parse_url
from tierfs.store import usage, verify
from tierfs.testing import ObjectTierTests

pytestmark = pytest.mark.filterwarnings("default")

CONTENT = bytes(range(256)) * 80_000  # 20 MB: more than one chunk


@pytest.fixture(scope="module", params=["ministack", "azurite", "gcs_fake"])
def server(request):
    with servers.running(request.param) as server:
        yield server


@pytest.fixture
def cloud(server, monkeypatch):
    """Yield the server. fsspec and child processes find its options."""
    monkeypatch.setenv(f"FSSPEC_{server.protocol.upper()}", json.dumps(server.options))
    monkeypatch.setitem(fsspec.config.conf, server.protocol, dict(server.options))
    return server


@pytest.fixture
def url(cloud):
    return f"{cloud.protocol}://{cloud.new_root()}"


class TestObjects(ObjectTierTests):
    @pytest.fixture(autouse=True)
    def versions(self, server):
        self.versions_name_contents = server.protocol == "s3"  # an ETag is a hash

    @pytest.fixture
    def objects(self, server):
        backend = connect(server.protocol, server.new_root(), server.options, attempts=1)
        return as_promised(backend, probe(backend).capabilities)


def test_all_that_is_asked_for_is_promised(cloud, url, caplog):
    store = tierfs.init(url, options=cloud.options)
    assert store.descriptor.endpoint.missing == []
    assert "cannot promise" not in caplog.text


def test_a_store_saves_lists_moves_and_verifies(cloud, url):
    store = tierfs.init(url, options=cloud.options)
    fs = tierfs.TierFileSystem(target_protocol=cloud.protocol, target_options=cloud.options)
    root = url.partition("://")[2]
    fs.pipe_file(f"{root}/run/data.bin", CONTENT)
    fs.pipe_file(f"{root}/run/.metadata", b"metadata")
    fs.wait(root, "object", 60)
    assert fs.cat_file(f"{root}/run/data.bin", start=16_000_000, end=17_000_000) == CONTENT[16_000_000:17_000_000]
    fs.mv(f"{root}/run/data.bin", f"{root}/run/moved.bin")
    fs.wait(root, "object", 60)
    assert fs.ls(f"{root}/run", detail=False) == [f"{root}/run/.metadata", f"{root}/run/moved.bin"]
    assert verify(store).damage == []


def test_names_are_literal(cloud, url):
    tierfs.init(url, options=cloud.options)
    fs = tierfs.TierFileSystem(target_protocol=cloud.protocol, target_options=cloud.options, ack="object")
    root = url.partition("://")[2]
    names = ["a", "a?", "a#", "a?b", "a%20b", "a b", "a+b", "a\\b", "a\nb", "a\tb", "a.", "a ", "d#/b", "d/b"]
    contents = {f"{root}/{name}": name.encode() for name in names}
    for path, content in contents.items():
        fs.pipe_file(path, content)
    assert fs.cat(fs.find(root)) == contents


class Filesystem(AbstractFixtures):
    """A store that writes straight through to the server."""

    @pytest.fixture
    def fs(self, cloud, url):
        tierfs.init(url, options=cloud.options)
        made = tierfs.TierFileSystem(
            target_protocol=cloud.protocol, target_options=cloud.options, ack="object", ram="0", nvme="0"
        )
        self.root = url.partition("://")[2]
        return made

    @pytest.fixture
    def fs_path(self, fs):
        return f"{self.root}/tests"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)


class TestCopy(Filesystem, AbstractCopyTests):
    pass


class TestGet(Filesystem, AbstractGetTests):
    pass


class TestPut(Filesystem, AbstractPutTests):
    pass


class TestOpen(Filesystem, AbstractOpenTests):
    pass


class TestPipe(Filesystem, AbstractPipeTests):
    pass


def test_two_ranks_save_and_load_a_checkpoint(cloud, url, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    tierfs.init(url, options=cloud.options)
    program = os.path.join(os.path.dirname(__file__), "cloud_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    for ack, verb in (("object", "save"), ("local", "save"), ("object", "load")):
        environment = {**os.environ, "TIERFS_STATE_DIR": str(tmp_path / verb), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launch, verb, f"tierfs::{url}/run/{ack if verb == 'save' else 'object'}", ack],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]


def test_a_demo_killed_in_a_save_resumes_to_the_same_losses(cloud, url, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    tierfs.init(url, options=cloud.options)
    door = f"tierfs::{url}/demo"
    command = [sys.executable, "-m", "tierfs.cli", "demo", "--url", door, "--params", "200k"]
    done = subprocess.run(
        [*command, "--steps", "6", "--every", "2", "--json"],
        env={**os.environ, "TIERFS_STATE_DIR": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "SIGKILL" in done.stderr
    said = json.loads(done.stdout)
    assert said["equal"] is True
    assert (said["killed_at"], said["resumed_from"], said["terminated_at"]) == (4, 2, 4)
    # The proof after the kill has no earlier checkpoint to replay from; the proof after SIGTERM has one.
    assert said["proofs"] == [
        {"step": 2, "proven": True, "replayed": 0},
        {"step": 4, "proven": True, "replayed": 2},
    ]
    assert [row["step"] for row in said["losses"]] == [1, 2, 3, 4, 5, 6]
    assert all(row["equal"] for row in said["losses"])
    assert len({row["uninterrupted"] for row in said["losses"]}) == 6
    steps = [f"{run}/step_{step}" for run in ("straight", "resumed") for step in (2, 4, 6)]
    assert [(one["name"], one["level"]) for one in said["checkpoints"]] == [(name, "object") for name in steps]
    # The run repeated the killed save in the same directory.
    fs, root = fsspec.url_to_fs(door)
    assert fs.isfile(f"{root}/resumed/step_4/.metadata")
    # The second run saves the same bytes as the first one, and the store keeps them once.
    totals = said["totals"]
    assert 0 < totals["stored_bytes"] < 0.7 * totals["logical_bytes"]
    assert totals["stored_bytes"] == usage(*open_store(parse_url(door))).stored_bytes
