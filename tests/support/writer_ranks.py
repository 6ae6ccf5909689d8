"""Scenarios of two spawned ranks for the tests of TierWriter. One world runs them all: torch starts slowly."""

from __future__ import annotations

import contextlib
import copy
import json
import operator
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from support.held_planner import Held
from support.saved_files import content_of
from support.waiting import HANG_S
from tierfs.dcp import TierLoadPlanner, TierReader, TierSavePlanner, TierWriter
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.errors import InvalidInputError, NotFoundError

WORLD = 2
OPTIONS = {"ram": "256MiB", "nvme": "0"}


class Unlucky(TierWriter):
    """A writer that fails on rank 1."""

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


def check(
    url: str, mesh: DeviceMesh, seed: int, placements: Any, options: Any = OPTIONS, *, reader: Any = TierReader
) -> None:
    found = sharded(mesh, -1, placements)
    dcp.load(found, storage_reader=reader(url, **options))
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
        # One save at a time: both ranks use the same group for their collectives.
        futures[-1].result()
    for seed in (1, 2, 3):
        check(f"{url}/{seed}", mesh, seed, [Shard(1)])


def in_a_process(url: str, mesh: DeviceMesh) -> None:
    """Another process saves what the writer staged, or torch's own stager, as torchtitan's pinned mode does.

    `dcp_ranks` runs it: those ranks have such a process, which takes seconds to start.
    """
    torchs = DefaultStager(StagingOptions(False, True, False, False))
    for seed, stager in ((1, None), (2, torchs)):
        live = sharded(mesh, seed, [Shard(0)])
        writer = TierWriter(f"{url}/elsewhere", **OPTIONS)
        future = dcp.async_save(
            live,
            storage_writer=writer,
            checkpoint_id=f"{url}/{seed}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        live["rows"].to_local().zero_()
        future.result()
        other = TierWriter(f"{url}/{seed}", **OPTIONS)
        other.wait("object")
        assert other.ack() == "object"
    for seed in (1, 2):
        check(f"{url}/{seed}", mesh, seed, [Shard(1)])


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


class UnluckyAtTheEnd(TierWriter):
    """A writer whose coordinator cannot publish, although every rank has written its part."""

    is_unlucky = False

    def finish(self, metadata: Any, results: Any) -> None:
        if self.is_unlucky:
            raise OSError("rank 0 lost its network")
        super().finish(metadata, results)


def failure_of_the_coordinator(url: str, mesh: DeviceMesh) -> None:
    """Every rank reports the coordinator's failure to any caller. After a save that ended, every rank knows its id."""
    writer = UnluckyAtTheEnd(url, **OPTIONS)
    metadata = dcp.save(sharded(mesh, 1, [Shard(0)]), storage_writer=writer)
    for how in (dcp.save, dcp.async_save):
        writer.is_unlucky = True
        try:
            saving = how(sharded(mesh, 2, [Shard(0)]), storage_writer=writer)
            saving.result()
        except CheckpointException as error:
            assert "rank 0 lost its network" in str(error)  # noqa: PT017 - on every rank
        else:
            raise AssertionError("the save seemed to succeed")
        pickle.loads(pickle.dumps(metadata))  # a copy that names another save
        for ask in (writer.wait, writer.ack):
            try:
                ask()
            except NotFoundError as error:
                assert "has not finished in this process" in str(error)  # noqa: PT017 - on every rank
            else:
                raise AssertionError("the save that failed seemed to be safe")
        writer.is_unlucky = False
        metadata = dcp.save(sharded(mesh, 3, [Shard(0)]), storage_writer=writer)
        writer.wait()
        assert writer.ack() == "object"
        ids: list[Any] = [None] * WORLD
        dist.all_gather_object(ids, writer.save_id)
        assert set(ids) == {metadata.storage_meta.save_id}, ids
    check(url, mesh, 3, [Shard(1)])


def unusual_on_one_rank(url: str, mesh: DeviceMesh) -> None:
    made: dict[str, Any] = {
        "sparse": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
        "not initialized": torch.nn.UninitializedParameter,
    }
    writer = TierWriter(url, **OPTIONS)
    state = {"odd": torch.ones(3), "same": torch.ones(3)}
    dcp.async_save(state, storage_writer=writer).result()
    for what, make in made.items():
        odd = {"odd": make()} if dist.get_rank() == 1 else {}
        try:
            dcp.async_save({**state, **odd}, storage_writer=writer, checkpoint_id=f"{url}-{what}").result()
        except CheckpointException as error:
            assert "'odd', a tensor" in str(error)  # noqa: PT017 - on every rank
            assert what in str(error)  # noqa: PT017
        else:
            raise AssertionError(f"{what}: the save seemed to succeed")
        dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{url}-{what}").result()


def on_two_hosts(url: str, mesh: DeviceMesh) -> None:
    """With each rank on its own host, there is no checkpoint before both hosts' parts are in the object tier."""
    rank, here = dist.get_rank(), {**OPTIONS, "state_dir": f"{os.environ['HOSTS']}/{dist.get_rank()}"}
    writer = TierWriter(url, **here)
    dcp.save(sharded(mesh, 1, [Shard(0)]), storage_writer=writer)
    writer.wait("object")
    check(url, mesh, 1, [Shard(1)], here)
    dist.barrier()
    # Stop the second host's flusher: the save is incomplete while that flusher holds data.
    flusher = writer.status()["flusher"].get("pid") if rank == 1 else None
    if flusher is None and rank == 1:
        dcp.save({"x": torch.ones(1)}, storage_writer=TierWriter(f"{url}-other", **here), no_dist=True)
        flusher = writer.status()["flusher"]["pid"]
    if flusher is not None:
        os.kill(flusher, signal.SIGSTOP)
    dist.barrier()
    dcp.save(sharded(mesh, 2, [Shard(0)]), storage_writer=writer)
    assert writer.ack() == "staged"
    if rank == 0:
        try:
            writer.wait("object", timeout=1)
        except TimeoutError as error:
            assert "waits for 1 of 2 files: rank-00001" in str(error), error  # noqa: PT017 - on this rank alone
        else:
            raise AssertionError("nobody has published rank 1's part")
    dist.barrier()
    check(url, mesh, 1, [Shard(0)], here)
    dist.barrier()
    if flusher is not None:
        os.kill(flusher, signal.SIGCONT)
    writer.wait("object")
    check(url, mesh, 2, [Shard(0)], here)
    assert writer.ack() == "object"


@contextlib.contextmanager
def bytes_staged() -> Iterator[list[int]]:
    """Record how many bytes each staging of this rank copies."""
    counted: list[int] = []
    real = ShardFile.copy_from_host

    def copy(self: ShardFile, plan: Any, tensors: Any, addresses: Any) -> Any:
        counted.append(sum(sum(run.lengths) for run in plan.runs))
        return real(self, plan, tensors, addresses)

    ShardFile.copy_from_host = copy  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        ShardFile.copy_from_host = real  # type: ignore[method-assign]


def replicated(mesh: DeviceMesh, seed: int, tensors: int = 9) -> dict[str, Any]:
    """Return a state that every rank holds completely, with tied weights and names in lists."""
    state: dict[str, Any] = {
        f"layer{number}": {"weight": whole(seed + number), "moments": [whole(-number), torch.tensor(float(seed))]}
        for number in range(tensors)
    }
    state["tied"] = state["layer0"]["weight"]
    state["mesh"] = distribute_tensor(whole(seed), mesh, [Replicate()])
    state["step"] = seed
    state[""] = {"layer0": {"weight": whole(-seed)}}  # a name that begins with a dot
    return state


def save_replicated(writer: TierWriter, url: str, state: dict[str, Any], **options: Any) -> None:
    dcp.async_save(state, storage_writer=writer, checkpoint_id=url, **options).result()


def check_replicated(url: str, mesh: DeviceMesh, seed: int, tensors: int = 9, *, tied: bool = True) -> None:
    found, expected = replicated(mesh, -5, tensors), replicated(mesh, seed, tensors)
    if not tied:
        del found["tied"]
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    for number in range(tensors):
        for name in ("weight", "moments"):
            ours, theirs = found[f"layer{number}"][name], expected[f"layer{number}"][name]
            assert all(map(torch.equal, ours, theirs)) if name == "moments" else torch.equal(ours, theirs)
    assert not tied or torch.equal(found["tied"], expected["tied"])
    assert torch.equal(found["mesh"].full_tensor(), expected["mesh"].full_tensor())
    assert found["step"] == seed


def replicas(url: str, mesh: DeviceMesh) -> None:
    """From the second save on, one rank stages each replica."""
    for caching in (False, True):
        writer = TierWriter(url, **OPTIONS)
        with bytes_staged() as counted:
            for seed in range(1, 5):
                options = {"planner": DefaultSavePlanner(enable_plan_caching=caching)}
                state = replicated(mesh, seed)
                if not caching:
                    del state["tied"]  # a tensor that occurs twice is staged without a plan of the whole state
                save_replicated(writer, f"{url}/{caching}/{seed}", state, **options)
        mine = torch.tensor(counted)
        dist.all_reduce(mine)
        once = whole(0).nbytes * 21
        assert mine[0] >= 2 * once * 0.9, mine
        assert all(later <= 1.05 * once for later in mine[1:]), (mine, once)
        for seed in range(1, 5):
            check_replicated(f"{url}/{caching}/{seed}", mesh, seed, tied=caching)


def replicas_of_saves_that_overlap(url: str, mesh: DeviceMesh) -> None:
    """A save that another one overtakes does not fail. When all have ended, each replica is staged once again."""
    writer, groups = TierWriter(url, **OPTIONS), [dist.new_group(backend="gloo") for _ in range(3)]
    save_replicated(writer, f"{url}/0", replicated(mesh, 0))
    planners, slow = [Held("create_local_plan"), Held("create_local_plan")], []
    try:
        for seed in (0, 1):
            options = {"planner": planners[seed], "process_group": groups[seed]}
            target = f"{url}/slow-{seed}"
            slow.append(dcp.async_save(replicated(mesh, seed), storage_writer=writer, checkpoint_id=target, **options))
            save_replicated(writer, f"{url}/{seed}", replicated(mesh, seed), process_group=groups[2])
    finally:
        for planner in planners:
            planner.go_on.set()
    for seed, saving in enumerate(slow):
        saving.result()
        check_replicated(f"{url}/slow-{seed}", mesh, seed)
    save_replicated(writer, f"{url}/2", replicated(mesh, 2))
    with bytes_staged() as counted:
        save_replicated(writer, f"{url}/3", replicated(mesh, 3))
    mine = torch.tensor(counted[0])
    dist.all_reduce(mine)
    assert mine <= 1.05 * whole(0).nbytes * 21, mine
    check_replicated(f"{url}/3", mesh, 3)


def replicas_that_change(url: str, mesh: DeviceMesh) -> None:
    """If all ranks' states change alike, saves succeed. If a rank lacks a tensor it must save, all ranks fail."""
    rank, writer = dist.get_rank(), TierWriter(url, **OPTIONS)
    save_replicated(writer, f"{url}/1", replicated(mesh, 1))
    save_replicated(writer, f"{url}/2", replicated(mesh, 2, tensors=12))
    check_replicated(f"{url}/2", mesh, 2, tensors=12)
    save_replicated(writer, f"{url}/3", replicated(mesh, 3, tensors=5))
    check_replicated(f"{url}/3", mesh, 3, tensors=5)
    # One tensor has fewer dimensions, after saves that left the replicas out by the same plan.
    state = replicated(mesh, 4)
    for number in range(1, 5):
        for again in range(3):
            save_replicated(writer, f"{url}/{number}-{again}", state)
        state[f"layer{number}"]["weight"] = whole(number).flatten()
        save_replicated(writer, f"{url}/{number}-flat", state)
        found = {f"layer{number}": {"weight": torch.zeros_like(whole(0).flatten())}}
        dcp.load(found, storage_reader=TierReader(f"{url}/{number}-flat", **OPTIONS))
        assert torch.equal(found[f"layer{number}"]["weight"], whole(number).flatten())
    # Other shapes, other dtypes, another placement.
    state["layer1"]["weight"] = whole(4)[:50].contiguous()
    state["layer2"]["weight"] = whole(4).to(torch.float16)
    state["mesh"] = distribute_tensor(whole(4), mesh, [Shard(0)])
    save_replicated(writer, f"{url}/4", state)
    found = {"layer1": {"weight": torch.zeros(50, 64)}, "mesh": distribute_tensor(whole(0), mesh, [Shard(1)])}
    dcp.load(found, storage_reader=TierReader(f"{url}/4", **OPTIONS))
    assert torch.equal(found["layer1"]["weight"], state["layer1"]["weight"])
    assert torch.equal(found["mesh"].full_tensor(), state["mesh"].full_tensor())
    # Rank 0 now has only its step: it also lacks the tensors that it was to save.
    save_replicated(writer, f"{url}/5", replicated(mesh, 5))
    one_sided = replicated(mesh, 6)  # on both ranks, since it runs collectives
    if rank == 0:
        one_sided = {"step": 6}
    try:
        save_replicated(writer, f"{url}/6", one_sided)
    except CheckpointException as error:
        assert "no rank saves layer" in str(error), error  # noqa: PT017 - on every rank
    else:
        raise AssertionError("rank 0's tensors are nowhere, and nobody says so")
    save_replicated(writer, f"{url}/6", one_sided)
    check_replicated(f"{url}/6", mesh, 6)


@dataclass
class Holder:
    """An object that is pickled as a whole."""

    tensor: torch.Tensor


def replicas_in_objects(url: str, mesh: DeviceMesh) -> None:
    """An object contains the tensors it refers to, whichever rank saves it or saves the tensor under its name."""
    writer = TierWriter(url, **OPTIONS)
    for seed in (1, 2, 3):
        first, second = whole(seed), whole(-seed)
        state = {"first": first, "second": second, "holders": [Holder(first), Holder(first), Holder(second)]}
        # First lists, which DCP flattens; then tuples, which it pickles.
        state.update({name: [whole(seed), whole(seed)] if seed == 1 else (whole(seed), whole(seed)) for name in "abc"})
        save_replicated(writer, f"{url}/{seed}", state)
    found: dict[str, Any] = {"holders": None, **dict.fromkeys("abc")}
    dcp.load(found, storage_reader=TierReader(f"{url}/3", **OPTIONS), planner=TierLoadPlanner(allow=[Holder]))
    expected = [whole(3), whole(3), whole(-3)]
    assert all(torch.equal(holder.tensor, tensor) for holder, tensor in zip(found["holders"], expected, strict=True))
    assert all(torch.equal(tensor, whole(3)) for name in "abc" for tensor in found[name])
    # This planner does not flatten dicts, unlike the previous one.
    nested = {name: {"x": whole(4), "y": whole(4)} for name in "abc"}
    save_replicated(writer, f"{url}/4", nested)
    flat = {"planner": DefaultSavePlanner(flatten_state_dict=False)}
    try:
        save_replicated(writer, f"{url}/5", nested, **flat)
    except CheckpointException as error:
        assert "saves it in an object" in str(error), error  # noqa: PT017 - on every rank
    else:
        raise AssertionError("an object was saved without its tensors")
    save_replicated(writer, f"{url}/5", nested, **flat)


class Caching(DefaultSavePlanner):
    """A planner class of its own, since DCP caches plans under the name of the class."""


def replicas_of_cached_plans(url: str, mesh: DeviceMesh) -> None:
    """A rank that reuses a cached plan still reports the items that the plan leaves to other ranks."""
    rank, writer = dist.get_rank(), TierWriter(url, **OPTIONS)
    state = {f"tensor{number}": whole(number) for number in range(4)}
    for number in (1, 2, 3):
        if number == 3:  # the plan changes; from now on the cached plan has only the items that the rank saves itself
            state["new"] = whole(9)
        save_replicated(writer, f"{url}/{number}", state, planner=Caching(enable_plan_caching=True))
    lost: list[Any] = [None] * WORLD
    dist.all_gather_object(lost, sorted(set(state) - set(writer._replicas._items)))
    if rank == 0:
        del state[next(name for name in lost[0] if name not in lost[1])]
    try:
        save_replicated(writer, f"{url}/4", state, planner=Caching(enable_plan_caching=True))
    except CheckpointException as error:
        assert "no rank saves tensor" in str(error), error  # noqa: PT017 - on every rank
    else:
        raise AssertionError("rank 1 has a tensor that is nowhere, and nobody says so")


class Cloning(DefaultSavePlanner):
    """Save clones of the state's tensors, which placeholders cannot stand for."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner({name: value.clone() for name, value in state_dict.items()}, *args, **kwargs)


def replicas_that_a_planner_cannot_do_without(url: str, mesh: DeviceMesh) -> None:
    """The writer detects such a planner within two failed saves, instead of failing every second save."""
    writer = TierWriter(url, **OPTIONS)
    failed = []
    for seed in range(1, 9):
        try:
            save_replicated(writer, f"{url}/{seed}", {"a": whole(seed), "b": whole(-seed)}, planner=Cloning())
        except CheckpointException:
            failed.append(seed)
    assert len(failed) == 2, failed
    assert failed[-1] < 6, failed


def what_one_rank_cannot_stage(url: str, mesh: DeviceMesh) -> None:
    """If one rank cannot stage a value, no rank waits for it, and the writer stays usable."""
    writer = TierWriter(url, **OPTIONS)
    for bad in (threading.Lock() if dist.get_rank() else 1, threading.Lock()):
        future = dcp.async_save({"a": whole(1), "mine": bad}, storage_writer=writer)
        try:
            future.result(HANG_S)
        except CheckpointException as error:
            assert "'mine' contains an object that cannot be copied" in str(error), error  # noqa: PT017 - on every rank
            assert 1 in error.failures  # noqa: PT017
        else:
            raise AssertionError("a lock was saved")
    kept = {"a": whole(2), "mine": 2}
    dcp.async_save(kept, storage_writer=writer).result()
    writer.wait("object")
    found = {"a": torch.zeros(1001, 64), "mine": 0}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    assert torch.equal(found["a"], kept["a"])
    assert found["mine"] == 2


def on_their_own(url: str, mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    dcp.save({"mine": torch.full((3,), float(rank))}, storage_writer=TierWriter(url, **OPTIONS), use_collectives=False)
    found = {"mine": torch.zeros(3)}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    assert torch.equal(found["mine"], torch.full((3,), float(rank)))


class Watching(DefaultSavePlanner):
    """Note the plans that arrive, and make every rank's final plan from that of the coordinator.

    Attributes:
        mine: This rank's own plan.
        arrived: On the coordinator, the plans of all ranks.
    """

    def create_local_plan(self) -> Any:
        self.mine = super().create_local_plan()
        return self.mine

    def create_global_plan(self, all_plans: Any) -> Any:
        self.arrived = all_plans
        plans, metadata = super().create_global_plan(all_plans)
        return [replace(plans[0], items=plan.items) for plan in plans], metadata


def plans_sent_to_the_coordinator(url: str, mesh: DeviceMesh) -> None:
    """The coordinator does not pickle its own items. In the pickles of other ranks, equal sizes are one object."""
    planner, state = Watching(), {f"w{rank}": torch.full((3, 4), float(rank)) for rank in range(20)}
    state["rows"] = distribute_tensor(whole(1), mesh, [Shard(0)])
    metadata = dcp.save(state, storage_writer=TierWriter(url, **OPTIONS), planner=planner)
    if dist.get_rank() == 0:
        own, other = planner.arrived
        assert all(map(operator.is_, own.items, planner.mine.items))
        assert len({id(item.tensor_data.size) for item in other.items if item.index.fqn != "rows"}) == 1
    assert pickle.loads(pickle.dumps(metadata)).state_dict_metadata == metadata.state_dict_metadata
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def a_group_of_one(url: str, mesh: DeviceMesh) -> None:
    """A rank that saves alone sends itself nothing, and its metadata can be pickled afterwards."""
    groups, rank = [dist.new_group([rank]) for rank in range(WORLD)], dist.get_rank()
    writer = TierWriter(f"{url}/{rank}", **OPTIONS)
    for seed in (1, 2):
        planner, state = Watching(), {"w": whole(seed), "step": seed}
        future = dcp.async_save(state, storage_writer=writer, planner=planner, process_group=groups[rank])
        metadata = future.result()
        assert all(map(operator.is_, planner.arrived[0].items, planner.mine.items))
        for copied in (pickle.loads(pickle.dumps(metadata)), copy.deepcopy(metadata)):
            assert copied.state_dict_metadata == metadata.state_dict_metadata
            assert copied.storage_meta.save_id == writer.save_id
        found = {"w": torch.zeros(1001, 64), "step": 0}
        dcp.load(found, storage_reader=TierReader(f"{url}/{rank}", **OPTIONS), no_dist=True)
        assert torch.equal(found["w"], state["w"])
        assert found["step"] == seed
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.mine)
    assert copy.deepcopy(plan).items == planner.mine.items
    elsewhere = pickle.dumps(plan)
    pickle.dumps(writer.prepare_local_plan(planner.mine))
    try:
        pickle.loads(elsewhere)
    except InvalidInputError as error:
        assert "has no content" in str(error)  # noqa: PT017 - on every rank
    else:
        raise AssertionError("the pickle of one plan gave another")


def plans_that_are_kept(url: str, mesh: DeviceMesh) -> None:
    """`TierSavePlanner` saves what torch's planner saves, whatever changes on one rank or all, and in other groups."""
    rank, alone = dist.get_rank(), [dist.new_group([rank]) for rank in range(WORLD)]
    state = replicated(mesh, 0)
    del state["tied"]
    state["rows"] = distribute_tensor(whole(1), mesh, [Shard(0)])

    def changes() -> Iterator[None]:
        """Change the state, and yield it several times."""
        yield from (None, None, None, None)
        state["rows"] = distribute_tensor(whole(2), mesh, [Shard(1)])
        yield from (None, None)
        if rank == 1:
            state["mine"] = torch.ones(3)
        yield from (None, None)
        if rank == 1:
            state["mine"] = torch.ones(3, dtype=torch.float64)
        yield from (None, None)
        state["layer0"]["weight"] = whole(3).half()
        yield from (None, None)
        if rank == 0:
            state["step of rank 0"] = 4
        yield from (None, None)

    kinds = {"ours": TierSavePlanner, "torch": DefaultSavePlanner}
    writers = {name: TierWriter(f"{url}/{name}", **OPTIONS) for name in kinds}

    def save(number: int, state: dict[str, Any], group: Any) -> None:
        tables, contents = [], []
        for name, kind in kinds.items():
            where = f"{url}/{name}/{number}" + (f"-{rank}" if group is not None else "")
            options = {"planner": kind(), "process_group": group, "checkpoint_id": where}
            metadata = dcp.async_save(state, storage_writer=writers[name], **options).result()
            assert metadata.storage_meta.save_id == writers[name].save_id
            tables.append(metadata.state_dict_metadata)
            dist.barrier()
            contents += [content_of(where, **OPTIONS)] if rank == 0 or group is not None else []
        assert tables[0] == tables[1]
        assert contents[:1] == contents[1:], number

    for number, _ in enumerate(changes()):
        state["step"] = number
        state["layer1"]["weight"] += 1
        save(number, state, None)
    writers = {name: TierWriter(f"{url}/{name}", **OPTIONS) for name in kinds}
    for number, group in enumerate((None, None, alone[rank], None, alone[rank], alone[rank], None), 100):
        save(number, {f"of rank {rank}": whole(number)}, group)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        resharding,
        staged,
        failure,
        failure_of_the_coordinator,
        unusual_on_one_rank,
        on_two_hosts,
        replicas,
        replicas_of_saves_that_overlap,
        replicas_that_change,
        replicas_in_objects,
        replicas_of_cached_plans,
        replicas_that_a_planner_cannot_do_without,
        what_one_rank_cannot_stage,
        on_their_own,
        plans_sent_to_the_coordinator,
        a_group_of_one,
        plans_that_are_kept,
    )
}


def main(rank: int, directory: Path, url: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD), HOSTS=str(directory / "hosts")
    )
    (directory / "hosts").mkdir(exist_ok=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/world", rank=rank, world_size=WORLD, timeout=timedelta(seconds=HANG_S)
    )
    torch.set_num_threads(1)  # with more threads, the same step ends in other last bits when the machine is busy
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
