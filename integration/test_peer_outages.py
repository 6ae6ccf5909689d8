"""Hosts hold each other's changes while S3 is away, and bring them there when it is back and their owner is lost."""

import contextlib
import os
import time

import outages
import pytest

pytest.importorskip("cryptography")

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

import torch
import torch.distributed.checkpoint as dcp
from support.peer_hosts import LEASE_S, PeerHost, bare, until

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.train import Every, Latest, Manager

WAIT_S = 120
OWNER, HOLDER = 17461, 17462


@pytest.fixture
def world(s3_of_environment, tmp_path):
    """A store in S3 behind a proxy, its owner and its holder."""
    server, proxy = s3_of_environment
    with contextlib.ExitStack() as ends:
        url = f"s3://{server.new_root()}"
        tierfs.init(url, lease_s=LEASE_S)
        hosts = [PeerHost(tmp_path, name, url, port) for name, port in (("owner", OWNER), ("holder", HOLDER))]
        for host in hosts:
            ends.callback(host.close)
            host.start()
        ends.callback(proxy.recover)  # before the hosts close
        for host in hosts:
            until(lambda host=host: host.status().get("peers", {}).get("live"), WAIT_S)
        yield proxy, *hosts


@pytest.mark.parametrize("outage", ["refuse", "unavailable"])
def test_a_save_reaches_peer_while_s3_is_away_and_s3_afterwards(world, outage):
    proxy, owner, holder = world
    fs, root = owner.open(ack="peer")
    fs.pipe_file(f"{root}/run/before", b"x")
    outages.begin(proxy, outage)
    time.sleep(2 * LEASE_S)  # no record can be renewed for longer than it counts
    data = os.urandom(300_000)
    fs.pipe_file(f"{root}/run/a", data)
    assert fs.ack(f"{root}/run/a") == "peer"
    owner.lose()
    proxy.recover()
    there, store = bare(holder.url)
    until(lambda: there.exists(f"{store}/run/a"), WAIT_S)
    assert there.cat_file(f"{store}/run/a") == data
    assert holder.status()["conflict_files"] == 0


def test_a_checkpoint_of_dcp_at_peer_survives_its_host(world):
    _, owner, holder = world
    settings = {**owner.settings, "state_dir": str(owner.state)}
    state = {"weight": torch.randn(400, 400), "step": 7}
    outages.begin(world[0], "no-chunks")
    writer = TierWriter(f"tierfs::{owner.url}/run/step_7", ack="peer", **settings)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.ack() == "peer"
    owner.lose()
    world[0].recover()
    there, store = bare(holder.url)
    until(lambda: there.exists(f"{store}/run/step_7/.metadata"), WAIT_S)
    found = {"weight": torch.zeros(400, 400), "step": 0}
    dcp.load(found, storage_reader=TierReader(f"tierfs::{holder.url}/run/step_7", ram="0", nvme="0"), no_dist=True)
    assert torch.equal(found["weight"], state["weight"])
    assert found["step"] == 7


def test_a_manager_at_peer_saves_keeps_and_prunes(world):
    _, owner, holder = world
    settings = {**owner.settings, "state_dir": str(owner.state)}
    model = torch.nn.Linear(300, 300)
    state = {"model": model.state_dict()}
    with Manager(
        f"tierfs::{owner.url}/run", save=[Every(steps=1)], keep=[Latest(2)], ack="peer", **settings
    ) as manager:
        for step in range(1, 6):
            manager.step(step, state)
        manager.wait()
    until(lambda: owner.status()["queue_files"] == 0, WAIT_S)
    until(lambda: holder.status()["peers"]["holds_files"] == 0, WAIT_S)
    assert owner.status()["conflict_files"] == holder.status()["conflict_files"] == 0
    there, store = bare(owner.url)
    assert sorted(path.rpartition("/")[2] for path in there.ls(f"{store}/run", detail=False) if "step_" in path)[
        -2:
    ] == [
        "step_4",
        "step_5",
    ]
