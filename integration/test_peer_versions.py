"""A host with a version before peers shares a store with hosts that have them."""

import io
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from peer_cluster import LEASE_S, WAIT_S, Cluster, filesystem, until

import tierfs

pytest.importorskip("cryptography")
BEFORE_PEERS = "cad0a206"
RUN = "import sys, tierfs.cli as it; assert it.__file__.startswith(sys.argv.pop(1)); sys.exit(it.main())"
_REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The directory of the older package."""
    command = ["git", "-C", str(_REPOSITORY), "archive", BEFORE_PEERS, "tierfs"]
    try:
        packed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"the repository has no commit {BEFORE_PEERS}")
    directory = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter="data")
    return directory


def save(url, settings, contents, level):
    fs, root = filesystem(url, settings)
    for path, data in contents.items():
        fs.pipe_file(f"{root}/{path}", data, ack=level)


def content(seed):
    return random.Random(str(seed)).randbytes(300_000)


def test_an_older_host_ignores_peers_and_harms_nothing(old, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "bare"))
    url, state = f"file://{tmp_path}/store", tmp_path / "old"
    tierfs.init(url, lease_s=LEASE_S, grace_s=4 * LEASE_S)
    environment = {**os.environ, "PYTHONPATH": str(old), "TIERFS_STATE_DIR": str(state)}

    def run(*words):
        command = [sys.executable, "-P", "-c", RUN, str(old), *words]
        return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=WAIT_S).stdout

    def put(path, data):
        """Let the older version write a file."""
        (tmp_path / "data").write_bytes(data)
        run("cp", str(tmp_path / "data"), f"tierfs::{url}/{path}")

    assert (
        str(old).encode()
        in subprocess.run(
            [sys.executable, "-P", "-c", "import tierfs; print(tierfs.__file__)"],
            env=environment,
            capture_output=True,
            check=True,
        ).stdout
    )
    with Cluster(tmp_path, url) as cluster:
        a, b = cluster.host("a", bandwidth=1).start(), cluster.host("b").start()
        until(lambda: a.status()["peers"]["live"], WAIT_S)
        put("shared", content("shared"))
        contents = {"run/new": content("new"), "run/shared": content("shared"), "run/latest": b"new"}
        a.run(save, url, a.options, contents, "peer")
        put("old", content("old"))
        run("rm", f"tierfs::{url}/shared")
        chunks = tmp_path / "store/.tierfs/chunks"
        before = set(chunks.rglob("*.0"))
        until(lambda: run("gc", f"tierfs::{url}") and before - set(chunks.rglob("*.0")), WAIT_S)
        assert a.status()["peers"]["live"] == b.status()["peers"]["live"] == 1
        assert b.status()["peers"]["holds_files"] == len(contents)
        records = list((tmp_path / "store/.tierfs/peers").iterdir())
        assert len(records) == 2
        a.remove()
        until(lambda: not b.status()["peers"]["holds_files"], WAIT_S)
        assert b.status()["conflict_files"] == 0
    found = {path: run("cat", f"tierfs::{url}/{path}") for path in (*contents, "old")}
    assert found == {**contents, "old": content("old")}
    run("verify", f"tierfs::{url}")
