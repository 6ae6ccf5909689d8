"""Scenarios of two spawned ranks for the tests of the manager. One world runs them all: torch starts slowly."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from support.waiting import HANG_S
from tierfs.errors import ConflictError, CorruptionError, TierfsError
from tierfs.train import Every, Latest, Manager, Preemption, TrainState
from tierfs.train.agree import World

WORLD = 2
OPTIONS: dict[str, Any] = {"ram": "0", "nvme": "0", "timeout": HANG_S}
STEP_S = 0.002


def manager(root: str, **arguments: Any) -> Manager:
    return Manager(root, **{"save": [Every(steps=2)], **OPTIONS, **arguments})


def state(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    whole = torch.arange(101 * 8, dtype=torch.float32).reshape(101, 8) + seed
    return {
        "model": {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "everywhere": distribute_tensor(whole[:3], mesh, [Replicate()]),
            "plain": torch.full((5,), float(seed)),
        },
        f"rank_{dist.get_rank()}": {"own": torch.full((3,), 10.0 * seed + dist.get_rank())},
        "count": seed,
    }


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if hasattr(first, "to_local"):
        return torch.equal(first.to_local(), second.to_local())
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def everybody(value: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def both_ranks_save_and_restore(root: str, mesh: DeviceMesh) -> None:
    with manager(root, ram="64MiB") as run:
        saved = [run.step(step, state(mesh, step)) for step in range(1, 6)]
    assert [handle.step for handle in saved if handle is not None] == [2, 4]
    found = state(mesh, -1)
    with manager(root, ram="64MiB") as run:  # with local tiers, this run also sees data that is only staged
        restored = run.restore(found)
        assert run.checkpoints[-1].is_complete
    assert restored is not None
    assert (restored.step, restored.passed_over) == (4, ())
    assert restored.about.world_size == WORLD
    assert same(found, state(mesh, 4))


def a_signal_to_one_rank_saves_and_stops_both(root: str, mesh: DeviceMesh) -> None:
    with pytest.raises(SystemExit) as ended, manager(root, save=[Preemption()]) as run:
        for step in range(1, 5000):
            if step == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(STEP_S)
            run.step(step, state(mesh, step))
            if run.stopping:
                break
        assert everybody(step) == [step, step]
        assert 5 <= step < 4999
        assert run.latest() == step
    assert ended.value.code == 143
    with manager(root) as run:
        found = state(mesh, -1)
        assert run.restore(found).step == step
    assert same(found, state(mesh, step))


def a_signal_during_an_evaluation_saves_and_stops_both(root: str, mesh: DeviceMesh) -> None:
    with manager(root, save=[Preemption()]) as run:
        run.step(1, state(mesh, 1))
        for batch in range(10_000):
            if batch == 20 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(STEP_S / 10)
            if run.check():
                break
        assert run.stopping
        assert run.check()
        assert everybody(batch) == [batch, batch]
        assert batch >= 20
        assert run.latest() == 1


class Hurried:
    """A user's policy that asks for a save on one rank only."""

    def should_save(self, step: int, previous: Any, *, context: Any) -> bool:
        return dist.get_rank() == 1 and step >= 3 and not previous


def what_one_rank_wishes_all_do(root: str, mesh: DeviceMesh) -> None:
    with manager(root, save=[Hurried()]) as run:
        saved = []
        live = state(mesh, 1)
        for step in range(1, 5000):
            time.sleep(STEP_S)
            saved.append(run.step(step, live))
            if saved[-1] is not None:
                break
    steps = [handle.step for handle in saved if handle is not None]
    assert len(steps) == 1
    assert steps[0] >= 3
    assert everybody(steps) == [steps, steps]


def fast_steps_agree_seldom_and_periodic_saves_keep_their_steps(root: str, mesh: DeviceMesh) -> None:
    live = state(mesh, 1)
    with manager(root, save=[Every(steps=150), Every(minutes=60)]) as run:
        saved = []
        for step in range(1, 301):
            time.sleep(STEP_S / 4)
            saved.append(run.step(step, live))
        every = run._decider._at_steps.every
        assert every > 1
        assert everybody(every) == [every] * WORLD
    assert [handle.step for handle in saved if handle is not None] == [150, 300]


def ranks_at_different_steps_are_an_error_on_both(root: str, mesh: DeviceMesh) -> None:
    with manager(root, save=()) as run:
        run.step(1 + dist.get_rank(), state(mesh, 1))
        with pytest.raises(ConflictError, match="from step 1 to 2"):
            run.step(2 + dist.get_rank(), state(mesh, 2))


class Broken:
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise OSError("rank 1 lost its disk")
        return {"x": torch.ones(2)}


def a_rank_that_cannot_save_fails_the_save_and_not_the_run(root: str, mesh: DeviceMesh) -> None:
    with manager(root) as run:
        handle = run.save(1, {**state(mesh, 1), "broken": Broken()})
        with pytest.raises((OSError, TierfsError), match="lost its disk"):
            handle.wait()
        run.save(2, state(mesh, 2)).wait()
        assert run.latest() == 2


def what_one_rank_cancels_nobody_saves(root: str, mesh: DeviceMesh) -> None:
    with manager(root) as run:
        first = run.save(1, state(mesh, 1))
        second = run.save(2, state(mesh, 2))
        if dist.get_rank() == 1:
            second.cancel()
        first.wait()
        outcome = type(wait_for(second)).__name__
        assert everybody(outcome) == [outcome] * WORLD


def wait_for(handle: Any) -> BaseException | None:
    try:
        handle.wait()
    except Exception as error:
        return error
    return None


def a_step_that_one_rank_lacks_is_passed_over_by_both(root: str, mesh: DeviceMesh) -> None:
    with manager(root) as run:
        for step in (1, 2, 3):
            run.save(step, state(mesh, step)).wait()
    dist.barrier()
    with manager(root) as run:
        if dist.get_rank() == 1:
            found_by_all = run._run.problem_of
            run._run.problem_of = lambda step, **known: "lost" if step == 3 else found_by_all(step, **known)
        found = state(mesh, -1)
        restored = run.restore(found)
        assert restored.step == 2
        assert [step for step, _ in restored.passed_over] == [3]
    assert same(found, state(mesh, 2))


def both_ranks_go_back_to_one_step(root: str, mesh: DeviceMesh) -> None:
    with manager(root) as run:
        for step in range(1, 9):
            run.step(step, state(mesh, step))
    for begin, end, expected in ((4, 5, 4), (None, 8, 8)):  # the first life ends before its first save
        dist.barrier()
        with manager(root) as run:
            assert run.restore(state(mesh, -1), step=begin).step == 4
            for step in range(5, end + 1):
                run.step(step, state(mesh, 100 + step))
            run.wait()
            assert run.errors == []
        dist.barrier()
        found = state(mesh, -1)
        with manager(root) as run:
            assert run.restore(found).step == expected
    assert same(found, state(mesh, 108))


def steps_that_no_rank_has_in_common_are_no_fresh_start(root: str, mesh: DeviceMesh) -> None:
    with manager(root) as run:
        run.save(1, state(mesh, 1)).wait()
    dist.barrier()
    with manager(root) as run:
        if dist.get_rank() == 1:
            run._run.problem_of = lambda *_, **__: "lost"
        with pytest.raises(CorruptionError, match="step 1"):
            run.restore(state(mesh, -1))


class Losing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1 lost its memory")
        return super().resolve_data(write_item)


def failures_in_a_row_end_the_run_on_both_at_one_step(root: str, mesh: DeviceMesh) -> None:
    with manager(root, save=[Every(steps=1)], max_failures=2, planner=Losing) as run:
        with pytest.raises(TierfsError, match="saves in a row failed"):
            for step in range(1, 50):
                time.sleep(STEP_S)
                run.step(step, state(mesh, step))
        assert everybody(step) == [step, step]
        assert len(run.errors) >= 2
        assert run.latest() is None


def a_failure_that_one_rank_has_not_heard_of_is_saved_again_by_both(root: str, mesh: DeviceMesh) -> None:
    planners = [DefaultSavePlanner, Losing]
    with manager(root, planner=lambda: planners.pop()()) as run:
        failed = run.save(1, state(mesh, 1))
        failed.settle(30)
        if dist.get_rank() == 1:
            failed._ended = Future()  # as before its thread has finished
        again = run.save(1, state(mesh, 1))
        assert everybody(again is failed) == [False] * WORLD
        again.wait()
        assert run.latest() == 1


def train_state(mesh: DeviceMesh, seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Dropout(0.5), torch.nn.Linear(10, 6))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed + dist.get_rank())
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        dataloader=None,
    )


def train(state: TrainState) -> str:
    loss = state.model(torch.randn(3, 6)).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()
    return loss.item().hex()


def a_sharded_run_goes_on_bit_for_bit_with_each_ranks_randomness(root: str, mesh: DeviceMesh) -> None:
    straight = train_state(mesh, 1)
    expected = [train(straight) for _ in range(6)]
    first, second = train_state(mesh, 1), train_state(mesh, 2)
    second_seed = torch.get_rng_state()
    torch.manual_seed(1 + dist.get_rank())
    losses = [train(first) for _ in range(3)]
    with manager(root) as run:
        run.save(2, first)
        torch.set_rng_state(second_seed)
        restored = run.restore(second)
        assert restored.is_exact
        report = run.verify_resume(second)
        assert report.first_difference is None, str(report)
        with torch.no_grad():
            second.model[0].weight.to_local().add_(dist.get_rank())
        report = run.verify_resume(second)
        assert report.first_difference.part == "model"
        assert report.first_difference.detail.endswith("of rank 1")
        run.restore(second)
        losses += [train(second) for _ in range(3)]
    assert losses == expected
    assert everybody(losses)[0] != everybody(losses)[1]


def one_rank_removes_what_none_keeps(root: str, mesh: DeviceMesh) -> None:
    with manager(root, keep=[Latest(2)]) as run:
        for step in (1, 2, 3, 4):
            run.save(step, state(mesh, step))
            run.wait()
            dist.barrier()
    with manager(root) as run:
        assert [each.step for each in run.checkpoints] == [3, 4]
        assert run.restore(state(mesh, -1)).step == 4
        assert [each["step"] for each in run._run.record_of(4)["known"]] == [2, 3]


def the_first_ranks_value_is_everybodys(root: str, mesh: DeviceMesh) -> None:
    world = World(30.0)
    assert world.from_first(f"rank {world.rank}", world.saving) == "rank 0"
    assert world.gather(world.rank, world.training) == [0, 1]
    assert world.begin_greatest((world.rank, -world.rank), world.training)() == [1, 0]
    world.close()


def weights_that_differ_by_rank_are_noted(root: str, mesh: DeviceMesh) -> None:
    model = torch.nn.Linear(3, 3)
    with manager(root, save=()) as run:
        for step in (1, 2):
            torch.nn.init.constant_(model.weight, float(step * dist.get_rank()))
            run.save(step, {"model": model})
            run.wait()
        assert not run.restore({"model": model}).is_exact


def buffers_that_differ_by_rank_come_back_from_a_later_save(root: str, mesh: DeviceMesh) -> None:
    saved, loaded = ({"model": torch.nn.BatchNorm1d(4)} for _ in range(2))
    with manager(root, save=()) as run:
        for step in (1, 2):  # from the second save on, a rank leaves what all have to one of them
            saved["model"](torch.full((2, 4), float(step + dist.get_rank())))
            run.save(step, saved)
            run.wait()
        assert run.restore(loaded).notes == ()
    assert same(*({**each["model"].state_dict()} for each in (saved, loaded)))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        both_ranks_save_and_restore,
        a_signal_to_one_rank_saves_and_stops_both,
        a_signal_during_an_evaluation_saves_and_stops_both,
        what_one_rank_wishes_all_do,
        fast_steps_agree_seldom_and_periodic_saves_keep_their_steps,
        ranks_at_different_steps_are_an_error_on_both,
        a_rank_that_cannot_save_fails_the_save_and_not_the_run,
        what_one_rank_cancels_nobody_saves,
        a_step_that_one_rank_lacks_is_passed_over_by_both,
        both_ranks_go_back_to_one_step,
        steps_that_no_rank_has_in_common_are_no_fresh_start,
        failures_in_a_row_end_the_run_on_both_at_one_step,
        a_failure_that_one_rank_has_not_heard_of_is_saved_again_by_both,
        one_rank_removes_what_none_keeps,
        a_sharded_run_goes_on_bit_for_bit_with_each_ranks_randomness,
        the_first_ranks_value_is_everybodys,
        weights_that_differ_by_rank_are_noted,
        buffers_that_differ_by_rank_come_back_from_a_later_save,
    )
}


def main(rank: int, directory: Path, url: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/world", rank=rank, world_size=WORLD, timeout=timedelta(seconds=HANG_S)
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    outcomes = {}
    for name, scenario in SCENARIOS.items():
        dist.barrier()
        begun = time.monotonic()
        try:
            scenario(f"{url}/{name}", mesh)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
        print(f"rank {rank}: {name}: {time.monotonic() - begun:.2f} s", flush=True)
    (directory / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
