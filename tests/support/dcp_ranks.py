"""Shared parts of the tests of stock DCP: states to save, comparisons, and the scenarios of two spawned ranks.

Starting torch takes seconds, so one world of two ranks runs every scenario in turn. Each scenario is named after the
behaviour that it checks. Each rank writes its results to a file, which the tests read.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tierfs.errors import CorruptionError, StoreNotFoundError

WORLD = 2
DEADLINE_S = 200
NUMBERS = 3 << 20  # 12 MiB as float32; three of these fill two chunks and part of a third
STORE_NAME = "lab"


def refuse_sync() -> None:
    """Stand in for ``os.sync``: tierfs must never flush every filesystem of the machine."""
    raise AssertionError("os.sync was called")


class Unsavable(torch.Tensor):
    """A tensor that raises in the middle of the data file that is being written."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("this tensor cannot be serialised")


class GuardedPlanner(DefaultSavePlanner):
    """Refuse ``os.sync`` wherever the save runs, and write that process's id to a file."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self.note = note

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        os.sync = refuse_sync
        self.note.write_text(str(os.getpid()))
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


# -- states ------------------------------------------------------------------------------------------------------------


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements in order. For a sharded tensor, all ranks must call it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def fingerprint(state: Any, prefix: str = "") -> dict[str, str]:
    """Map the path of every leaf of a nested state to its content. Equal maps mean bit-exact equal states."""
    if isinstance(state, torch.Tensor):
        content = hashlib.sha256(raw_bytes(state)).hexdigest()
        return {prefix: f"{state.dtype} {tuple(state.shape)} {content}"}
    if isinstance(state, dict):
        parts = [fingerprint(value, f"{prefix}/{key}") for key, value in state.items()]
        return {path: leaf for part in parts for path, leaf in part.items()}
    if isinstance(state, (list, tuple)):
        return fingerprint(dict(enumerate(state)), prefix)
    return {prefix: repr(state)}


class Trainer:
    """A sharded model and its optimizer after two steps, all derived from the seed."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        # Two ranks cannot divide 1025 or 5 rows evenly, and the second rank holds no part of a single row.
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 1025), torch.nn.GELU(), torch.nn.Linear(1025, 5), torch.nn.Linear(5, 1)
        )
        for layer in self.model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * seed)
        self.step()
        self.step()

    def step(self) -> None:
        self.model(torch.randn(3, 256)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, url: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=url)
        self.take(state)

    def take(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def fingerprint(self) -> dict[str, str]:
        return fingerprint(self.state())


def stop_checkpoint_process() -> None:
    """End the process that DCP's process mode leaves behind. It exits once nothing refers to it."""
    _async_process_executor._CHECKPOINT_PROCESS = None


# -- the world of two ranks --------------------------------------------------------------------------------------------


class Lab(NamedTuple):
    """Places that a world works in.

    Attributes:
        directory: Holds notes and results.
        root: URL of an existing store, without ``tierfs::``.
        named: The same kind of place as a named store, which the first write creates.
    """

    directory: Path
    root: str
    named: str


class Rank(NamedTuple):
    """One rank of a running world."""

    number: int
    mesh: DeviceMesh
    lab: Lab


def run_rank(number: int, lab: Lab) -> None:
    """Run every scenario in a spawned process, and stop at the first that fails."""
    torch.set_num_threads(1)
    os.sync = refuse_sync
    dist.init_process_group(
        "gloo",
        init_method=f"file://{lab.directory}/rendezvous",
        rank=number,
        world_size=WORLD,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    rank = Rank(number, init_device_mesh("cpu", (WORLD,)), lab)
    outcomes = {}
    for scenario in SCENARIOS:
        try:
            scenario(rank)
        except BaseException:
            outcomes[scenario.__name__] = traceback.format_exc()
            break
        outcomes[scenario.__name__] = ""
        dist.barrier()
    (lab.directory / f"outcomes-{number}.json").write_text(json.dumps(outcomes))
    stop_checkpoint_process()
    dist.destroy_process_group()


def read_outcomes(lab: Lab) -> list[dict[str, str]]:
    """Return the results that each rank wrote."""
    return [json.loads((lab.directory / f"outcomes-{number}.json").read_text()) for number in range(WORLD)]


def both_ranks_create_the_store_at_the_first_write(rank: Rank) -> None:
    url = f"{rank.lab.named}/first"
    dcp.save({"own": torch.full((4,), 7.0)}, checkpoint_id=url)
    state = {"own": torch.zeros(4)}
    dcp.load(state, checkpoint_id=url)
    assert state["own"].tolist() == [7.0] * 4


def a_sharded_model_and_its_optimizer_come_back_bit_exact(rank: Rank) -> None:
    url = f"{rank.lab.root}/from_two"
    trainer = Trainer(rank.mesh, seed=3)
    dcp.save(trainer.state(), checkpoint_id=url)
    expected = trainer.fingerprint()
    other = Trainer(rank.mesh, seed=4)
    assert other.fingerprint() != expected
    other.load(url)
    assert other.fingerprint() == expected
    if rank.number == 0:
        (rank.lab.directory / "from_two.json").write_text(json.dumps(expected))
    for trained in (trainer, other):
        torch.manual_seed(9)
        trained.step()
    assert other.fingerprint() == trainer.fingerprint()


def what_one_rank_saved_is_loaded_by_two(rank: Rank) -> None:
    expected = json.loads((rank.lab.directory / "from_one.json").read_text())
    trainer = Trainer(rank.mesh, seed=5)
    assert trainer.fingerprint() != expected
    trainer.load(f"{rank.lab.root}/from_one")
    assert trainer.fingerprint() == expected


def a_tensor_is_loaded_under_another_placement(rank: Rank) -> None:
    url = f"{rank.lab.root}/placement"
    full = torch.arange(7.0 * 5).reshape(7, 5)
    dcp.save({"weight": distribute_tensor(full, rank.mesh, [Shard(0)])}, checkpoint_id=url)
    for placement in (Shard(0), Shard(1), Replicate()):
        loaded = {"weight": distribute_tensor(torch.zeros(7, 5), rank.mesh, [placement])}
        dcp.load(loaded, checkpoint_id=url)
        assert torch.equal(loaded["weight"].full_tensor(), full)


def a_thread_saves_the_state_as_it_was_when_it_was_asked_to(rank: Rank) -> None:
    url = f"{rank.lab.root}/thread"
    trainer = Trainer(rank.mesh, seed=6)
    expected = trainer.fingerprint()
    # Collectives of the save's thread and of this thread must not mix. So do no training or gathering until it ends.
    future = dcp.async_save(trainer.state(), checkpoint_id=url, async_checkpointer_type=AsyncCheckpointerType.THREAD)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.to_local().zero_()
    future.result()
    trainer.load(url)
    assert trainer.fingerprint() == expected


def a_process_saves_the_state_as_it_was_when_it_was_asked_to(rank: Rank) -> None:
    url = f"{rank.lab.root}/process"
    note = rank.lab.directory / f"saved-by-{rank.number}"
    trainer = Trainer(rank.mesh, seed=7)
    expected = trainer.fingerprint()
    future = dcp.async_save(
        trainer.state(),
        checkpoint_id=url,
        planner=GuardedPlanner(note),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    trainer.step()
    future.result()
    assert int(note.read_text()) != os.getpid()
    assert trainer.fingerprint() != expected
    trainer.load(url)
    assert trainer.fingerprint() == expected


def a_process_finds_a_named_store_with_nothing_but_its_url(rank: Rank) -> None:
    url = f"{rank.lab.named}/process"
    trainer = Trainer(rank.mesh, seed=8)
    dcp.async_save(trainer.state(), checkpoint_id=url, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    expected = trainer.fingerprint()
    trainer.step()
    trainer.load(url)
    assert trainer.fingerprint() == expected


def a_writer_object_travels_to_the_process(rank: Rank) -> None:
    url = f"{rank.lab.root}/writer"
    trainer = Trainer(rank.mesh, seed=8)
    dcp.async_save(
        trainer.state(), storage_writer=FsspecWriter(url), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    ).result()
    expected = trainer.fingerprint()
    trainer.step()
    trainer.load(url)
    assert trainer.fingerprint() == expected


def a_process_saves_what_a_tier_writer_staged(rank: Rank) -> None:
    from support.writer_ranks import in_a_process

    in_a_process(f"{rank.lab.root}/staged", rank.mesh)


def a_process_reports_what_went_wrong_and_saves_the_next_one(rank: Rank) -> None:
    state = {"own": torch.full((3,), 2.0)}
    nowhere = f"tierfs::file://{rank.lab.directory}/no-store-here/ck"
    future = dcp.async_save(state, checkpoint_id=nowhere, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    failures = _failures(future.result)
    assert sorted(failures) == [0, 1]
    for error, _ in failures.values():
        assert isinstance(error, StoreNotFoundError)
        assert "tierfs init" in str(error)
    url = f"{rank.lab.root}/after_failure"
    dcp.async_save(state, checkpoint_id=url, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    loaded = {"own": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=url)
    assert loaded["own"].tolist() == [2.0] * 3


def ranks_that_write_the_same_bytes_at_once_store_them_once(rank: Rank) -> None:
    url = f"{rank.lab.root}/same"
    generator = torch.Generator().manual_seed(1)
    content = [torch.randn(NUMBERS, generator=generator) for _ in range(3)]
    state = {f"rank{rank.number}.{index}": tensor for index, tensor in enumerate(content)}
    dcp.save(state, checkpoint_id=url)
    fs, path = fsspec.url_to_fs(url)
    infos = [fs.info(f"{path}/__{number}_0.distcp") for number in range(WORLD)]
    assert infos[0]["digest"] == infos[1]["digest"]
    assert infos[0]["chunks"] >= 3
    store, relative = fs._locate(path)
    names = set()
    for number in range(WORLD):
        manifest = _manifest(store, f"{relative}/__{number}_0.distcp")
        names |= {row.name for row in manifest.rows}
    assert len(names) == infos[0]["chunks"]
    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=url)
    assert fingerprint(loaded) == fingerprint(state)


def an_error_crosses_ranks_with_its_path_and_kind(rank: Rank) -> None:
    sent = (
        CorruptionError("chunk 1 is damaged", path="run/x", tier="object") if rank.number else StoreNotFoundError("no")
    )
    received: list[Any] = [None] * WORLD
    dist.all_gather_object(received, sent)
    assert isinstance(received[0], StoreNotFoundError)
    assert isinstance(received[1], CorruptionError)
    assert (received[1].path, received[1].tier, received[1].kind) == ("run/x", "object", "corruption")
    assert str(pickle.loads(pickle.dumps(sent))) == str(sent)


def a_rank_that_fails_in_the_middle_of_its_file_publishes_nothing(rank: Rank) -> None:
    url = f"{rank.lab.root}/half"
    state = {f"rank{rank.number}.{index}": torch.full((NUMBERS,), 5.0) for index in range(3)}
    broken = dict(state)
    if rank.number == 1:
        broken["rank1.2"] = broken["rank1.2"].as_subclass(Unsavable)
    failures = _failures(lambda: dcp.save(broken, checkpoint_id=url))
    assert list(failures) == [1]
    assert "cannot be serialised" in str(failures[1][0])
    fs, path = fsspec.url_to_fs(url)
    assert [name.rpartition("/")[2] for name in fs.ls(path, detail=False)] == ["__0_0.distcp"]
    dist.barrier()
    dcp.save(state, checkpoint_id=url)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=url)
    assert fingerprint(loaded) == fingerprint(state)


def ranks_that_do_not_coordinate_save_and_load_their_own(rank: Rank) -> None:
    url = f"{rank.lab.root}/uncoordinated"
    state = {"own": torch.full((3,), float(rank.number))}
    dcp.save(state, checkpoint_id=url, use_collectives=False)
    fs, path = fsspec.url_to_fs(url)
    assert fs.isfile(f"{path}/__{rank.number}.metadata")
    loaded = {"own": torch.full((3,), 9.0)}
    dcp.load(loaded, checkpoint_id=url)
    assert loaded["own"].tolist() == [float(rank.number)] * 3


SCENARIOS = (
    both_ranks_create_the_store_at_the_first_write,
    a_sharded_model_and_its_optimizer_come_back_bit_exact,
    what_one_rank_saved_is_loaded_by_two,
    a_tensor_is_loaded_under_another_placement,
    a_thread_saves_the_state_as_it_was_when_it_was_asked_to,
    a_process_saves_the_state_as_it_was_when_it_was_asked_to,
    a_process_finds_a_named_store_with_nothing_but_its_url,
    a_writer_object_travels_to_the_process,
    a_process_saves_what_a_tier_writer_staged,
    a_process_reports_what_went_wrong_and_saves_the_next_one,
    ranks_that_write_the_same_bytes_at_once_store_them_once,
    an_error_crosses_ranks_with_its_path_and_kind,
    a_rank_that_fails_in_the_middle_of_its_file_publishes_nothing,
    ranks_that_do_not_coordinate_save_and_load_their_own,
)


def _failures(call: Any) -> dict[int, Any]:
    try:
        call()
    except CheckpointException as error:
        return dict(error.failures)
    raise AssertionError("nothing was raised")


def _manifest(store: Any, path: str) -> Any:
    from tierfs.store import stat

    return stat(store, path).manifest
