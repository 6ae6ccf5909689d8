"""The cases of the tests of TierWriter on meshes. Spawned ranks run all cases in one world: torch starts slowly."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_training_state import TrainingState
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter
from tierfs.demo.model import ByteGPT, ByteStream, shape_for
from tierfs.errors import NotFoundError

OPTIONS = {"ram": "512MiB", "nvme": "0"}
PROCESS = AsyncCheckpointerType.PROCESS
DEADLINE_S = 100


class World:
    """The meshes of one world, and the place it saves to. Every rank makes all meshes, even meshes without this rank.

    Args:
        url: A place in a store, for this case alone.
        size: Number of ranks.
    """

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.rank = url, size, dist.get_rank()
        self.line = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
        self.first = DeviceMesh("cpu", list(range(size // 2)))
        self.group = self.line.get_group()
        if size == 4:
            self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def below(self, name: str) -> World:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, url=f"{self.url}/{name}")
        return other

    def writer(self, url: str | None = None) -> TierWriter:
        return TierWriter(url or self.url, **OPTIONS)

    def reader(self, url: str | None = None) -> TierReader:
        return TierReader(url or self.url, **OPTIONS)

    def save(self, state: Any, *, how: str = "save", name: str = "", **options: Any) -> None:
        url = f"{self.url}/{name}" if name else self.url
        future = getattr(dcp, how)(state, storage_writer=self.writer(url), **options)
        if how == "async_save":
            future.result()

    def load(self, state: Any, *, name: str = "", **options: Any) -> None:
        url = f"{self.url}/{name}" if name else self.url
        dcp.load(state, storage_reader=self.reader(url), planner=TierLoadPlanner(), **options)


# -- comparison --------------------------------------------------------------------------------------------------------


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fingerprint(value: Any, path: str = "") -> dict[str, str]:
    """Return every leaf by its path. A sharded tensor is gathered, so every rank of its mesh must call this."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {path: f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(raw).hexdigest()}"}
    if isinstance(value, dict):
        parts = [fingerprint(inner, f"{path}/{key}") for key, inner in value.items()]
        return {name: leaf for part in parts for name, leaf in part.items()}
    if isinstance(value, (list, tuple)):
        return fingerprint(dict(enumerate(value)), path)
    return {path: repr(value)}


def logical_bytes(value: Any) -> int:
    """Return the bytes of a state's tensors, each counted whole and once."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(logical_bytes, value.values()))
    return sum(map(logical_bytes, value)) if isinstance(value, (list, tuple)) else 0


def stored_bytes(url: str) -> int:
    """Return the bytes of all tensors in a checkpoint's shard files, whether the checkpoint refers to them or not."""
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    objects = json.loads(fs.cat(f"{path}/.metadata"))["objects"]
    total = 0
    for name in fs.glob(f"{path}/*.safetensors"):
        data = fs.cat(name)
        table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        offsets = [entry["data_offsets"] for key, entry in table.items() if key != "__metadata__"]
        total += sum(end - begin for begin, end in offsets)
    return total - sum(entry["length"] for entry in objects.values())


def assert_written_once(world: World, state: Any, name: str = "") -> None:
    expected = logical_bytes(state)
    if world.rank == 0:
        found = stored_bytes(f"{world.url}/{name}" if name else world.url)
        assert found == expected, f"{found} bytes of tensors were stored, and the state has {expected}"
    dist.barrier()


class Model(torch.nn.Module):
    """Layers that divide evenly, layers that do not, one with fewer rows than ranks, and two names for one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(64, 96)
        self.down = torch.nn.Linear(96, 64)
        self.odd = torch.nn.Linear(64, 5)
        self.last = torch.nn.Linear(5, 1)
        self.tied = torch.nn.Linear(64, 5, bias=False)
        self.tied.weight = self.odd.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.odd(self.down(torch.nn.functional.gelu(self.up(x)))))


class Trained:
    """A model in some layout, and its optimizer, after two steps from a seed."""

    def __init__(self, seed: int, lay_out: Callable[[Model], Any] = lambda model: None) -> None:
        self.model = Model(seed)
        lay_out(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * (seed + 1))
        for number in range(2):
            self.model(values(8, 64, seed=number)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, world: World, **options: Any) -> dict[str, str]:
        state = self.state()
        world.load(state, **options)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return fingerprint(self.state())


def sharded_on(mesh: DeviceMesh) -> Callable[[Model], Any]:
    def lay_out(model: Model) -> None:
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    return lay_out


def split_on(mesh: DeviceMesh) -> Callable[[Model], Any]:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return lambda model: parallelize_module(model, mesh, plan)


def both_on(square: DeviceMesh) -> Callable[[Model], Any]:
    def lay_out(model: Model) -> None:
        split_on(square["inner"])(model)
        fully_shard(model, mesh=square["outer"])

    return lay_out


def layouts(world: World) -> dict[str, Callable[[Model], Any]]:
    found = {"fsdp": sharded_on(world.line), "tp": split_on(world.line)}
    if world.size == 4:
        found |= {"fsdp+tp": both_on(world.square), "hsdp": sharded_on(world.square)}
    return found


# -- models on meshes --------------------------------------------------------------------------------------------------


def models_come_back_on_every_other_mesh(world: World) -> None:
    """Save each layout once, and load it in every layout, on half of the ranks and on one."""
    made = {name: Trained(1, lay_out) for name, lay_out in layouts(world).items()}
    expected = {}
    for name, trained in made.items():
        state = trained.state()
        expected[name] = fingerprint(state)
        for how in ("save", "async_save"):
            world.save(state, how=how, name=f"{name}-{how}")
            # Two names of one weight are two tensors of a state.
            assert_written_once(world, state, f"{name}-{how}")
    others = {name: Trained(2, lay_out) for name, lay_out in layouts(world).items()}
    for source in made:
        for name, trained in others.items():
            assert trained.load(world, name=f"{source}-async_save") == expected[source], (source, name)
            if source == name:
                assert trained.load(world, name=f"{source}-save") == expected[source], name
    if world.rank < world.size // 2:
        half = Trained(3, sharded_on(world.first))
        for source in made:
            group = world.first.get_group()
            assert half.load(world, name=f"{source}-save", process_group=group) == expected[source], source
    if world.rank == world.size - 1:
        alone = Trained(4)
        for source in made:
            assert alone.load(world, name=f"{source}-save", no_dist=True) == expected[source], source


def fewer_ranks_save_and_all_load(world: World) -> None:
    """Save in a group of some ranks, while the other ranks do something else."""
    expected: list[Any] = [None]
    if world.rank < world.size // 2:
        half = Trained(5, sharded_on(world.first))
        expected = [fingerprint(half.state())]
        for how in ("save", "async_save"):
            world.save(half.state(), how=how, name=how, process_group=world.first.get_group())
    dist.broadcast_object_list(expected)
    for how in ("save", "async_save"):
        assert Trained(6, sharded_on(world.line)).load(world, name=how) == expected[0]


# -- tensors on meshes -------------------------------------------------------------------------------------------------


def placements(world: World) -> Iterable[tuple[DeviceMesh, list[Any]]]:
    yield from ((world.line, [placement]) for placement in (Shard(0), Shard(1), Replicate()))
    if world.size == 4:
        kinds = (Shard(0), Shard(1), Replicate())
        yield from ((world.square, [outer, inner]) for outer in kinds for inner in kinds)


SHAPES = [(5, 7), (1, 3), (3, 1), (2, 6, 3), (8, 8), (4097, 300), (0, 4), (13, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def matrices(mesh: DeviceMesh, placed: list[Any], seed: int) -> dict[str, DTensor]:
    found = {}
    for number, shape in enumerate(SHAPES):
        whole = values(*shape, seed=seed + number)
        found[f"{list(shape)}"] = distribute_tensor(whole, mesh, placed, src_data_rank=None)
    for dtype in DTYPES:
        local = values(6, 9, seed=seed).to(dtype)
        found[str(dtype)] = distribute_tensor(local, mesh, placed, src_data_rank=None)
    return found


def local_parts(state: dict[str, DTensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.to_local() for key, tensor in state.items()}


def uneven_tensors_come_back_under_every_placement(world: World) -> None:
    every = list(placements(world))
    for number, (mesh, placed) in enumerate(every):
        state = matrices(mesh, placed, seed=1)
        world.save(state, how="async_save" if number % 2 else "save", name=str(number))
        assert_written_once(world, state, str(number))
    for number in range(len(every)):
        # Not all pairs: each layout is loaded by itself and by three others.
        for step in (0, 1, 4, 7):
            mesh, placed = every[(number + step) % len(every)]
            state = matrices(mesh, placed, seed=99)
            world.load(state, name=str(number))
            # Compare each rank's local parts, because gloo cannot gather some of the dtypes.
            expected = fingerprint(local_parts(matrices(mesh, placed, seed=1)))
            assert fingerprint(local_parts(state)) == expected, (every[number], placed)


def summands_are_refused(world: World) -> None:
    for how in ("save", "async_save"):
        state = {"model": {"bad": DTensor.from_local(torch.ones(4), world.line, [Partial()])}}
        try:
            world.save(state, how=how)
        except CheckpointException as error:
            assert sorted(error.failures) == list(range(world.size))  # noqa: PT017 - on every rank
            assert "DTensor with partial placements" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a summand was saved as if it were the value")
    assert_there_is_none(world.url)


def sharded_tensors_come_back(world: World) -> None:
    ranks = [f"rank:{number}" for number in range(world.size)]
    rows = [12, 4, 16, 8]
    begins = np.cumsum([0, *rows])[:-1].tolist()
    specs = [
        ChunkShardingSpec(dim=0, placements=ranks),
        ChunkShardingSpec(dim=1, placements=ranks),
        ChunkShardingSpec(dim=0, placements=[*ranks, *reversed(ranks)]),
        EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=[begin, 0], shard_sizes=[count, 20], placement=ranks[-1 - number])
                for number, (begin, count) in enumerate(zip(begins, rows, strict=True))
            ]
        ),
    ]
    height = sum(rows)
    whole = values(height, 20)

    def made(spec: Any, *, full: bool) -> Any:
        tensor = sharded_tensor.zeros(spec, height, 20)
        for shard in tensor.local_shards() if full else []:
            box = [
                slice(at, at + n)
                for at, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            ]
            shard.tensor.copy_(whole[tuple(box)])
        return tensor

    for number, source in enumerate(specs):
        world.save({"t": made(source, full=True)}, how="async_save" if number % 2 else "save", name=str(number))
        for target in specs:
            state = {"t": made(target, full=False)}
            world.load(state, name=str(number))
            for shard, expected in zip(state["t"].local_shards(), made(target, full=True).local_shards(), strict=True):
                assert torch.equal(shard.tensor, expected.tensor), (number, target)
    plain = {"t": torch.zeros(height, 20)}
    world.load(plain, name="3")
    assert torch.equal(plain["t"], whole)
    world.save({"t": whole}, name="plain")
    for target in specs:
        state = {"t": made(target, full=False)}
        world.load(state, name="plain")
        for shard, expected in zip(state["t"].local_shards(), made(target, full=True).local_shards(), strict=True):
            assert torch.equal(shard.tensor, expected.tensor), target


# -- saves one after the other -----------------------------------------------------------------------------------------


def assert_there_is_none(url: str) -> None:
    try:
        TierReader(url, **OPTIONS).read_metadata()
    except NotFoundError:
        return
    raise AssertionError("half a checkpoint is there")


def several(world: World, seed: int) -> dict[str, Any]:
    return {
        "rows": distribute_tensor(values(401, 64, seed=seed), world.line, [Shard(0)], src_data_rank=None),
        "everywhere": distribute_tensor(values(9, 5, seed=seed), world.line, [Replicate()], src_data_rank=None),
        f"of_rank_{world.rank}": values(33, seed=100 * seed + world.rank),
        "step": seed,
    }


def assert_several(world: World, seed: int, **options: Any) -> None:
    expected = fingerprint(several(world, seed))
    found = several(world, seed + 1000)
    assert fingerprint(found) != expected
    world.load(found, **options)
    assert fingerprint(found) == expected


def a_writer_goes_from_threads_to_processes_and_back(world: World) -> None:
    writer = world.writer()
    for number in range(6):
        options = {"async_checkpointer_type": PROCESS} if number in {2, 3} else {}
        state = several(world, number)
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{world.url}/{number}", **options)
        state["everywhere"].to_local().zero_()
        future.result()
    for number in range(6):
        assert_several(world, number, name=str(number))


def a_process_takes_every_layout(world: World) -> None:
    for name, lay_out in layouts(world).items():
        trained = Trained(1, lay_out)
        expected = fingerprint(trained.state())
        future = dcp.async_save(
            trained.state(), storage_writer=world.writer(f"{world.url}/{name}"), async_checkpointer_type=PROCESS
        )
        with torch.no_grad():
            for parameter in trained.model.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
        future.result()
        assert Trained(2, lay_out).load(world, name=name) == expected


def without_an_id_the_writers_own_place_is_used(world: World) -> None:
    writer = world.writer(f"{world.url}/own")
    for number in range(3):
        dcp.async_save(several(world, number), storage_writer=writer).result()
        assert_several(world, number, name="own")
    writer.reset(f"{world.url}/other")
    dcp.async_save(several(world, 7), storage_writer=writer).result()
    assert_several(world, 7, name="other")
    assert_several(world, 2, name="own")


def what_a_writer_learns_of_replicas_harms_no_save(world: World) -> None:
    """A writer reuses its knowledge of replicas from one save in the next. This must not harm any save."""
    meshes = [placed for mesh, placed in placements(world) if mesh is world.square]
    writer = world.writer()

    def state(seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, placed in enumerate(meshes):
            for shape in ((9, 6), (700, 500)):
                if (number + seed) % 5:  # each save lacks some tensors of another
                    whole = values(*shape, seed=seed + number)
                    found[f"{number}-{shape}"] = distribute_tensor(whole, world.square, placed, src_data_rank=None)
        found["plain"] = values(31, seed=seed).to(torch.bfloat16 if seed % 3 else torch.float32)
        found["large"] = values(600, 600, seed=seed)
        found["tied"] = found["large"]
        return found

    def parts(found: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in found.items()}

    for seed in (1, 1, 1, 2, 3, 3, 4, 4):
        expected = fingerprint(parts(state(seed)))
        # The writer forgets a save that fails.
        for planner in (Failing(), None) if seed == 3 else (None,):
            live = state(seed)
            future = dcp.async_save(live, storage_writer=writer, checkpoint_id=f"{world.url}/{seed}", planner=planner)
            for tensor in parts(live).values():
                tensor.zero_()
            try:
                future.result()
            except CheckpointException:
                assert planner is not None
        found = state(seed + 100)
        found = {name: found[name] if name in found else live[name] for name in live}
        found["plain"] = found["plain"].to(live["plain"].dtype)
        world.load(found, name=str(seed))
        assert fingerprint(parts(found)) == expected, seed
        dist.barrier()


class Failing(DefaultSavePlanner):
    """Fail on one rank when its data is resolved."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the data is gone")
        return super().resolve_data(write_item)


def a_rank_may_have_nothing(world: World) -> None:
    for how in ("save", "async_save"):
        world.save({"a": torch.arange(5)} if world.rank else {}, how=how, name=how)
        found = {"a": torch.zeros(5, dtype=torch.int64)}
        world.load(found, name=how)
        assert torch.equal(found["a"], torch.arange(5))
        world.save({}, how=how, name=f"{how}-nothing")
        world.load({}, name=f"{how}-nothing")


# -- a training that goes on -------------------------------------------------------------------------------------------


def training(world: World, *, seed: int) -> TrainingState:
    torch.manual_seed(seed)
    shape = shape_for(60_000)
    model = ByteGPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=world.line)
    fully_shard(model, mesh=world.line)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    text = bytes(np.random.default_rng(1).integers(32, 127, 40_000, dtype=np.uint8))
    stream = ByteStream(text, batch=2, context=shape.context, rank=world.rank, world_size=world.size, seed=0)
    torch.manual_seed(seed + 1 + world.rank)
    return TrainingState(model, optimizer, stream, rank=world.rank)


def one_step(state: TrainingState) -> None:
    torch.autograd.backward(state.model(*state.stream.next_batch()))
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1


def saves_change_nothing_of_a_training_that_goes_on(world: World) -> None:
    plain = training(world, seed=1)
    for _ in range(9):
        one_step(plain)
    expected = plain.digest()
    saved, writer, copies = training(world, seed=1), world.writer(), {}
    group, future = dist.new_group(backend="gloo"), None
    for step in range(1, 10):
        one_step(saved)
        if step % 2 == 0:
            if future is not None:
                future.result()
            copies[step] = saved.digest()
            future = dcp.async_save(
                {"app": saved}, storage_writer=writer, checkpoint_id=f"{world.url}/{step}", process_group=group
            )
    future.result()
    assert saved.digest() == expected
    for step, digest in copies.items():
        other = training(world, seed=3)
        assert other.digest() != digest
        dcp.load({"app": other}, storage_reader=world.reader(f"{world.url}/{step}"))
        assert other.digest() == digest, step
        for _ in range(9 - step):
            one_step(other)
        assert other.digest() == expected, step


# -- the cost of a save ------------------------------------------------------------------------------------------------


def descriptors_and_mappings() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())


def descriptors_and_mappings_do_not_grow_with_the_number_of_tensors(world: World, **options: Any) -> None:
    """Count when torch has planned the save, in this process or in the process that saves for it."""
    held = []
    for number, count in enumerate((10, 10, 1000)):
        note = f"{os.environ['DCP_MESH_NOTES']}/{world.rank}-{number}"
        dcp.async_save(
            {f"rank{world.rank}.{layer}": values(20, 20) for layer in range(count)},
            storage_writer=world.writer(f"{world.url}/{number}"),
            planner=Counting(note),
            **options,
        ).result()
        held.append((descriptors_and_mappings(), json.loads(Path(note).read_text())))
    # The first save creates the segment and starts helpers.
    for few, many in zip(held[1], held[2], strict=True):
        assert many[0] - few[0] <= 4, held
        assert many[1] - few[1] <= 20, held


class Counting(DefaultSavePlanner):
    """Note the descriptors and mappings of the process when the plan is finished."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note

    def finish_plan(self, new_plan: Any) -> Any:
        Path(self.note).write_text(json.dumps(descriptors_and_mappings()))
        return super().finish_plan(new_plan)


# -- running the cases -------------------------------------------------------------------------------------------------

OF_FOUR = (
    models_come_back_on_every_other_mesh,
    fewer_ranks_save_and_all_load,
    uneven_tensors_come_back_under_every_placement,
    summands_are_refused,
    sharded_tensors_come_back,
    a_rank_may_have_nothing,
    without_an_id_the_writers_own_place_is_used,
    what_a_writer_learns_of_replicas_harms_no_save,
)
OF_TWO = (
    saves_change_nothing_of_a_training_that_goes_on,
    descriptors_and_mappings_do_not_grow_with_the_number_of_tensors,
    a_writer_goes_from_threads_to_processes_and_back,
    a_process_takes_every_layout,
)
CASES = {4: OF_FOUR, 2: OF_TWO}


def main(rank: int, size: int, directory: Path, url: str, asked: list[str]) -> None:
    """Run the cases with these names as a rank of a world, up to the first case that fails on any rank."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), DCP_MESH_NOTES=str(directory))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/world-{size}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    world = World(url, size)
    logging.getLogger("torch").setLevel(logging.ERROR)  # torch logs every fallback and every process
    outcomes: dict[str, str] = {}
    for case in [each for each in CASES[size] if each.__name__ in asked]:
        try:
            case(world.below(case.__name__))
            outcomes[case.__name__] = ""
        except BaseException:
            outcomes[case.__name__] = traceback.format_exc()
        problems: list[Any] = [None] * size
        dist.all_gather_object(problems, outcomes[case.__name__])
        if any(problems):
            break
    (directory / f"outcomes-{size}-{rank}.json").write_text(json.dumps(outcomes))
    _async_process_executor._CHECKPOINT_PROCESS = None
    dist.destroy_process_group()
