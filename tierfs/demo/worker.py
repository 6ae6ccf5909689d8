"""One rank of ``tierfs demo``: ``python -m tierfs.demo.worker``, started by `tierfs.demo.story`.

Train a small GPT deterministically under FSDP2 on gloo, with a `tierfs.train.Manager` that saves during training.
Events go to stdout, one JSON object per line: ``start``, ``proof``, ``step``, ``save``, ``stopped`` and ``done`` from
rank 0, ``mid-save`` from every rank. The process kills itself when its stdin is closed, so it never outlives its
launcher.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tierfs.demo.model import ByteGPT, ByteStream, shape_for, standard_library_text
from tierfs.digest import checksum
from tierfs.train import Every, Manager, Preemption, TrainState
from tierfs.train.position import reseed
from tierfs.train.values import digests_of

_BATCH = 4
_SEED = 0
_LEARNING_RATE = 1e-3
_WARM_UP_STEPS = 10
_REPLAYED_STEPS = 4
_CHECK_S = 0.01
_STATE_BYTES = 3 * 4  # a weight and two moments of AdamW, all float32
_HALT_S_MAX = 120.0

Announce = Callable[..., None]


class HaltingSavePlanner(DefaultSavePlanner):
    """A stock planner that halts in the middle of a save, so that the launcher can kill the process there.

    The kill depends on order, not on time: half of this rank's items are written when the planner calls ``announce``.
    If nobody kills the process within 120 s, the planner raises `TimeoutError`.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        super().__init__()
        self._announce = announce
        self._remaining = 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._remaining = len(plan.items) // 2
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the item's data. From the middle of the plan on, announce and halt instead."""
        if self._remaining == 0:
            self._announce()
            time.sleep(_HALT_S_MAX)
            raise TimeoutError(
                f"the launcher did not kill this process within {_HALT_S_MAX:.0f} s of the middle of its save"
            )
        self._remaining -= 1
        return super().resolve_data(write_item)


def main() -> int:
    """Run one rank to the end, and return its exit code."""
    arguments = _parse()
    announce = _take_stdout()
    threading.Thread(target=_end_with_launcher, name="tierfs-demo-launcher-watch", daemon=True).start()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - the only way to call it
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=arguments.timeout),
    )
    try:
        _train(arguments, announce)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tierfs.demo.worker", description=__doc__)
    parser.add_argument("--url", required=True, help="where this run's checkpoints go")
    parser.add_argument("--rendezvous", required=True, help="a file that does not exist yet, where the ranks meet")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps from one save to the next")
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--halt", type=int, help="stop for good in the middle of the save of this step")
    parser.add_argument("--terminate", type=int, help="send SIGTERM to the last rank at this step")
    parser.add_argument("--timeout", type=float, default=600, help="seconds any collective may take")
    return parser.parse_args()


def _take_stdout() -> Announce:
    """Reserve stdout for events: from now on, output of libraries goes to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def announce(event: str, **fields: object) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    return announce


def _end_with_launcher() -> None:
    """Kill this process when its launcher is gone. Only the launcher holds the other end of stdin."""
    # os.read, not sys.stdin: a thread that holds the lock of a buffered stdin breaks the interpreter's exit.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _train(arguments: argparse.Namespace, announce: Announce) -> None:
    """Train from the start or the newest checkpoint to the last step, and save on schedule."""

    def tell(event: str, **fields: object) -> None:
        if dist.get_rank() == 0:
            announce(event, **fields)

    def planner() -> DefaultSavePlanner:
        if (step := halting.pop("step", None)) is None:
            return DefaultSavePlanner()
        return HaltingSavePlanner(partial(announce, "mid-save", step=step, rank=dist.get_rank()))

    halting: dict[str, int] = {}
    state = _fresh_state(arguments)
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    save = [Every(steps=arguments.every), Preemption()]
    with Manager(arguments.url, save=save, planner=planner, timeout=arguments.timeout) as manager:
        restored = manager.restore(state)
        begin = restored.step if restored is not None else 0
        tell("start", parameters=parameters, step=begin)
        if restored is not None:
            report = manager.verify_resume(state, lambda step: _one_step(state, step), steps=_REPLAYED_STEPS)
            # The first checkpoint of a run has none before it from which to replay.
            is_same = all(each.outcome == "same" for each in report.checks if each.part != "losses" or report.replayed)
            tell("proof", step=report.step, proven=is_same, replayed=len(report.replayed), text=str(report))
        for step in range(begin + 1, arguments.steps + 1):
            began = time.perf_counter()
            loss = _one_step(state, step)
            tell("step", step=step, loss=loss.hex(), seconds=time.perf_counter() - began)
            if step == arguments.halt:
                manager.wait()  # so that the halt hits the save of this step, not an earlier one
                halting["step"] = step
            if step == arguments.terminate and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            saved = manager.step(step, state, metrics={"loss": loss})
            if saved is not None:
                tell("save", step=step, seconds=saved.blocked_s, bytes=parameters * _STATE_BYTES)
            if manager.stopping:
                tell("stopped", step=step)
                return
        if arguments.terminate is not None:
            # Ranks agree only every few steps, and may have finished the last step before they agree on the signal.
            while not manager.check():
                time.sleep(_CHECK_S)
            tell("stopped", step=arguments.steps)
            return
        manager.wait()
        tell("done", step=arguments.steps, digest=_digest(state))


def _fresh_state(arguments: argparse.Namespace) -> TrainState:
    """Return an equal model on all ranks, sharded, with its optimizer, and the data at its start."""
    torch.manual_seed(_SEED)
    shape = shape_for(arguments.params)
    model = ByteGPT(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP_STEPS))
    stream = ByteStream(
        standard_library_text(),
        batch=_BATCH,
        context=shape.context,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        seed=_SEED,
    )
    # From here on, each rank draws its own dropout. The weights above must be equal on all ranks.
    reseed(_SEED, dist.get_rank())
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=stream)


def _digest(state: TrainState) -> str:
    """Return one digest of the state of all ranks. A collective."""
    values, _ = state.to_save(state.step, "full")
    shares: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(shares, digests_of(values))
    return checksum(json.dumps(shares, sort_keys=True).encode()).hex()


def _one_step(state: TrainState, step: int) -> float:
    """Make one update, and return the mean loss over all ranks, in nats per byte."""
    loss: torch.Tensor = state.model(*state.dataloader.next_batch())
    torch.autograd.backward(loss)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    value = float(mean.item() / dist.get_world_size())
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss of step {step} is {value}, which cannot be compared")
    return value


if __name__ == "__main__":
    try:
        ended = main()
    except SystemExit as exit_:
        ended = int(exit_.code or 0)
    sys.stderr.flush()
    # Skip the interpreter's shutdown, which has been seen to abort here for an unknown reason. All saves are durable by
    # now.
    os._exit(ended)
