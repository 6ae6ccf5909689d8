"""What each of two spawned ranks does in the tests of TierWriter: every scenario in one world, since torch starts slowly."""

from __future__ import annotations

import json
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import Trainer, stop_checkpoint_process
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tierfs.dcp import TierReader, TierWriter
from tierfs.errors import NotFoundError

WORLD = 2
OPTIONS = {"ram": "256MiB", "nvme": "0"}


class Unlucky(TierWriter):
    """Rank 1 cannot write its part."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1 lost its disk")
        return super().write_data(plan, planner)


def whole(seed: int) -> torch.Tensor:
    return torch.arange(1001 * 64, dtype=torch.float32).reshape(1001, 64) + seed


def sharded(mesh: DeviceMesh, seed: int, placements: Any) -> dict[str, Any]:
    return {
        "rows": distribute_tensor(whole(seed), mesh, placements),
        "everywhere": distribute_tensor(whole(seed)[:7], mesh, [Replicate()]),
        "plain": torch.full((5,), float(seed)),
        "step": seed,
    }


def check(url: str, mesh: DeviceMesh, seed: int, placements: Any) -> None:
    found = sharded(mesh, -1, placements)
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    expected = sharded(mesh, seed, placements)
    assert torch.equal(found["rows"].full_tensor(), expected["rows"].full_tensor())
    assert torch.equal(found["everywhere"].full_tensor(), expected["everywhere"].full_tensor())
    assert torch.equal(found["plain"], expected["plain"])
    assert found["step"] == seed


def resharding(url: str, mesh: DeviceMesh) -> None:
    dcp.save(sharded(mesh, 1, [Shard(0)]), storage_writer=TierWriter(f"{url}/rows", **OPTIONS))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        check(f"{url}/rows", mesh, 1, placements)


def staged(url: str, mesh: DeviceMesh) -> None:
    writer = TierWriter(url, **OPTIONS)
    futures = []
    for seed in (1, 2, 3):
        live = sharded(mesh, seed, [Shard(0)])
        futures.append(dcp.async_save(live, storage_writer=writer, checkpoint_id=f"{url}/{seed}"))
        for tensor in (live["rows"].to_local(), live["everywhere"].to_local(), live["plain"]):
            tensor.zero_()
        # One at a time: both ranks use the same group for their collectives.
        futures[-1].result()
    for seed in (1, 2, 3):
        check(f"{url}/{seed}", mesh, seed, [Shard(1)])


def training_goes_on(url: str, mesh: DeviceMesh) -> None:
    """Two runs from one seed, one of which is saved after each step: they end the same, and so does what was saved."""
    plain, saved = Trainer(mesh, seed=3), Trainer(mesh, seed=3)
    writer, group = TierWriter(url, **OPTIONS), dist.new_group(backend="gloo")
    fingerprints = []
    future = None
    for step in range(4):
        for trainer in (plain, saved):
            torch.manual_seed(step)
            trainer.step()
        fingerprints.append(saved.fingerprint())
        if future is not None:
            future.result()  # one save at a time uses the group
        future = dcp.async_save(
            saved.state(), storage_writer=writer, checkpoint_id=f"{url}/{step}", process_group=group
        )
    future.result()
    assert plain.fingerprint() == saved.fingerprint()
    for step, expected in enumerate(fingerprints):
        other = Trainer(mesh, seed=4)
        state = other.state()
        dcp.load(state, storage_reader=TierReader(f"{url}/{step}", **OPTIONS))
        other.take(state)
        assert other.fingerprint() == expected, step


def in_a_process(url: str, mesh: DeviceMesh) -> None:
    writer = TierWriter(url, **OPTIONS)
    for seed in (1, 2):
        live = sharded(mesh, seed, [Shard(0)])
        future = dcp.async_save(
            live,
            storage_writer=writer,
            checkpoint_id=f"{url}/{seed}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        live["rows"].to_local().zero_()
        future.result()
    for seed in (1, 2):
        check(f"{url}/{seed}", mesh, seed, [Shard(1)])
    stop_checkpoint_process()


def failure(url: str, mesh: DeviceMesh) -> None:
    dcp.save(sharded(mesh, 1, [Shard(0)]), storage_writer=TierWriter(url, **OPTIONS))
    try:
        dcp.save(sharded(mesh, 2, [Shard(0)]), storage_writer=Unlucky(url, **OPTIONS))
    except CheckpointException as error:
        assert "rank 1 lost its disk" in str(error)  # noqa: PT017 - on every rank
    else:
        raise AssertionError("the save seemed to succeed")
    check(url, mesh, 1, [Shard(0)])
    try:
        dcp.save(sharded(mesh, 2, [Shard(0)]), storage_writer=Unlucky(f"{url}-new", **OPTIONS))
    except CheckpointException:
        pass
    try:
        TierReader(f"{url}-new", **OPTIONS).read_metadata()
    except NotFoundError:
        return
    raise AssertionError("half a checkpoint is there")


def on_their_own(url: str, mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    dcp.save({"mine": torch.full((3,), float(rank))}, storage_writer=TierWriter(url, **OPTIONS), use_collectives=False)
    found = {"mine": torch.zeros(3)}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    assert torch.equal(found["mine"], torch.full((3,), float(rank)))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (resharding, staged, training_goes_on, in_a_process, failure, on_their_own)
}


def main(rank: int, directory: Path, url: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/world", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    outcomes = {}
    for name, scenario in SCENARIOS.items():
        dist.barrier()
        try:
            scenario(f"{url}/{name}", mesh)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    (directory / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
