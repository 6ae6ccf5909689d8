"""Hosts read from others: one that returns empty, a job on other hosts, and all hosts that load one checkpoint."""

import contextlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers.server import free_ports

pytest.importorskip("cryptography")

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

import torch
import torch.distributed.checkpoint as dcp
from support.peer_hosts import LEASE_S, PeerHost, bare, until

import tierfs
from tierfs.dcp import TierReader
from tierfs.train import Every, Manager

WAIT_S = 120
JOB = Path(__file__).with_name("peer_job.py")


@pytest.fixture
def hosts(request, tmp_path, monkeypatch):
    """A function that makes a host that publishes nothing but small records. The parameter is the lease in seconds."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "bare"))
    url = f"file://{tmp_path}/store"
    tierfs.init(url, lease_s=getattr(request, "param", LEASE_S))
    with contextlib.ExitStack() as ends:

        def make(name, **settings):
            host = PeerHost(tmp_path, name, url, *free_ports(1), **{"bandwidth": 1, **settings})
            ends.callback(host.close)
            return host.start()

        yield make


def options(host):
    return {**host.settings, "state_dir": str(host.state)}


def states(seed):
    torch.manual_seed(seed)
    return {"weight": torch.randn(700, 700), "step": torch.tensor(seed)}


def manager(host, **more):
    return Manager(f"tierfs::{host.url}/run", save=[Every(steps=1)], ack="peer", **options(host), **more)


def test_a_host_that_returns_empty_restores_the_newest_step(hosts):
    owner, _ = hosts("a"), hosts("b")
    with manager(owner) as run:
        for step in (1, 2, 3):
            run.step(step, states(step))
        run.wait()
    owner.lose()
    # Another directory, because this process still has what the lost one had.
    again = hosts("a-again", peer_listen=owner.settings["peer_listen"])
    found = states(0)
    with manager(again) as run:
        assert run.latest(level="peer") == 3
        restored = run.restore(found)
    assert (restored.step, restored.level, restored.tier) == (3, "peer", "peer")
    assert restored.passed_over == ()
    assert all(torch.equal(found[name], value) for name, value in states(3).items())


def test_a_job_on_other_hosts_reads_a_save_of_lost_hosts(hosts):
    """Two ranks on two hosts save together; a third host holds both parts, and a fourth one loads them."""
    hosts("holder")
    owners = [hosts(name, peers=1, peer_domain="old") for name in ("a", "b")]
    for owner in owners:
        until(lambda owner=owner: owner.status()["peers"]["live"] == 2, WAIT_S)
    ranks = []
    [port] = free_ports(1)
    for rank, owner in enumerate(owners):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "1"}
        command = [sys.executable, str(JOB), f"tierfs::{owner.url}/run/step_7", json.dumps(options(owner))]
        ranks.append(subprocess.Popen(command, env=environment))
    assert [rank.wait(WAIT_S) for rank in ranks] == [0, 0]
    for owner in owners:
        owner.lose()
    reader = hosts("reader")
    found = {f"part{rank}": torch.zeros(600, 600) for rank in range(2)}
    dcp.load(found, storage_reader=TierReader(f"tierfs::{reader.url}/run/step_7", **options(reader)), no_dist=True)
    for rank in range(2):
        torch.manual_seed(rank)
        assert torch.equal(found[f"part{rank}"], torch.randn(600, 600))
    with manager(reader) as run:
        assert run.latest(level="peer") == 7


@pytest.mark.parametrize("hosts", [12], indirect=True, ids=["lease_12_s"])
def test_a_holder_that_refused_connections_is_asked_again(hosts):
    owner, holder = hosts("owner"), hosts("holder")
    for thread in os.listdir(
        f"/proc/{owner.pid}/task"
    ):  # on one processor, a thread that is refused often ends at once
        os.sched_setaffinity(int(thread), [min(os.sched_getaffinity(0))])
    fs, root = owner.open(ack="staged")
    for number in range(4):
        fs.pipe_file(f"{root}/x{number}", bytes([number]) * 300_000)
        fs.wait(root, "peer", timeout=WAIT_S)
        failed = owner.status()["counters"].get("flusher_peer_failures", 0) + 2
        holder.kill()
        until(lambda n=failed: owner.status()["counters"].get("flusher_peer_failures", 0) >= n, WAIT_S)
        holder.start()


def test_hosts_that_load_one_file_share_what_they_read(tmp_path, s3_of_environment):
    data = random.Random(1).randbytes(96 << 20)
    server, _ = s3_of_environment
    with contextlib.ExitStack() as ends:
        url = f"s3://{server.new_root()}"
        tierfs.init(url, lease_s=10)
        there, root = bare(url)
        there.pipe_file(f"{root}/run/x", data)
        ports = free_ports(4)
        room = {"ram": "128MiB", "nvme": "0", "peer_nvme": "0"}
        hosts = [PeerHost(tmp_path, str(number), url, port, **room) for number, port in enumerate(ports)]
        for host in hosts:
            ends.callback(host.close)
            host.start()
        for host in hosts:
            until(lambda host=host: host.status()["peers"]["live"] == 3, WAIT_S)
        opened = [host.open(peer_share=1) for host in hosts]
        with ThreadPoolExecutor(len(hosts)) as threads:
            read = list(threads.map(lambda each: each[0].cat_file(f"{each[1]}/run/x") == data, opened))
        assert read == [True] * 4
        counters = [fs.status(root)["counters"] for fs, root in opened]
        names = ("flusher_peer_brought_bytes", "process_object_read_bytes")
        # Without sharing it is four times. A host that is too busy to answer is passed over: peers.py has the figure.
        assert sum(each.get(name, 0) for each in counters for name in names) < 2 * len(data)
