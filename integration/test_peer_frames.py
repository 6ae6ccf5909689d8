"""An owner, its holder, or both are killed when a given number of bytes has passed between them.

The connection stands still at that byte, so the kill strikes within the same frame each time. The bytes go through the
handshake and all requests, from the greeting to the draft and to the word that the object tier has it.
"""

import os
import random

import pytest
from peer_cluster import LEASE_S, WAIT_S, Cluster, can_cut, filesystem, until

import tierfs
from tierfs.testing import PlannedTcpFault, TcpFault

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(not can_cut(), reason="network namespaces need root")
SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
CHUNK = 70_000  # the smallest files that have a chunk
PLACES = [("request", at) for at in (*range(50, 2400, 150), 40_000, *range(CHUNK + 1500, CHUNK + 2700, 150))]
PLACES += [("response", at) for at in range(50, 3400, 150)]


def content(path):
    return random.Random(path).randbytes(CHUNK if path.endswith("0") else 100)


def save(url, settings, contents):
    fs, root = filesystem(url, settings)
    for path, data in contents.items():
        fs.pipe_file(f"{root}/{path}", data, ack="staged")


def wait(url, settings, path, level):
    fs, root = filesystem(url, settings)
    fs.wait(f"{root}/{path}", level, timeout=WAIT_S)


def acknowledged(url, settings, paths):
    fs, root = filesystem(url, settings)
    return {path for path in paths if fs.ack(f"{root}/{path}") in {"peer", "object"}}


def read(url, settings, paths):
    fs, root = filesystem(url, settings)
    return {path: fs.cat_file(f"{root}/{path}") for path in paths if fs.exists(f"{root}/{path}")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    base = tmp_path_factory.mktemp("frames")
    url = f"file://{base}/store"
    tierfs.init(url, lease_s=LEASE_S)
    with Cluster(base, url) as cluster:
        cluster.host("holder").start()
        yield cluster


@pytest.mark.parametrize(("side", "at"), PLACES)
def test_a_kill_at_this_byte_loses_nothing(cluster, side, at):
    noise = random.Random(f"{SEED} {side} {at}")
    victims = noise.choice(["owner", "holder", "both"])
    end = noise.choice(["lost", "lost in the frame", "published"] if at < CHUNK / 2 else ["lost", "lost in the frame"])
    print(victims, end)
    holder, owner = cluster.hosts["holder"], cluster.host(f"{side}{at}", bandwidth=1)
    proxy = cluster.lead_through_proxy(owner, holder)
    proxy.refuse = end != "published"
    owner.start()
    contents = {f"{side}{at}/{number}": content(f"{side}{at}/{number}") for number in range(2)}
    owner.run(save, cluster.url, owner.options, contents)
    if end == "published":  # then the connection has to say so
        owner.run(wait, cluster.url, owner.options, list(contents)[-1], "peer")
        del owner.settings["bandwidth"]
    owner.kill()
    proxy.refuse = False
    proxy.fail(PlannedTcpFault(TcpFault.BLACK_HOLE, side, at))  # each connection, also one that reads
    owner.start()
    has_struck = until(lambda: proxy.fired or is_done(owner), WAIT_S) is not True
    kept = owner.run(acknowledged, cluster.url, owner.options, list(contents))
    for host in {"owner": [owner], "holder": [holder], "both": [owner, holder]}[victims]:
        host.kill()
    proxy.recover()
    if end == "lost in the frame":
        owner.remove()
    for host in (holder, owner):
        if host.state.exists():
            host.kill()
            host.start()
    if end == "lost":
        owner.run(wait, cluster.url, owner.options, list(contents)[-1], "peer")
        owner.remove()
    until(lambda: not holder.status()["peers"]["holds_files"], WAIT_S)
    assert holder.status()["conflict_files"] == 0
    bare = {"ram": "0", "nvme": "0", "state_dir": f"{cluster.base}/bare"}
    if end == "published":
        until(lambda: not owner.status()["queue_files"], WAIT_S)
        assert owner.status()["conflict_files"] == 0
        owner.remove()
    found = holder.run(read, cluster.url, bare, list(contents))
    assert found.items() <= contents.items()
    assert found.keys() >= kept
    assert end == "lost in the frame" or found == contents
    print("struck" if has_struck else "passed by")


def is_done(owner):
    """Return whether the connection has carried everything before that byte came."""
    status = owner.status()
    hosts = status["peers"]["hosts"]
    return bool(not status["queue_files"] or (hosts and hosts[0]["held_files"] == status["queue_files"]))
