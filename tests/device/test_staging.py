"""Saves from a GPU hold the state before the next step, in every mode, or fail; they never publish wrong bytes."""

import copy
import gc
import itertools
import pickle
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from support.fake_device import TRAINER_FIRST
from support.plan_changes import FITTING, OTHERS, check_each_save_is_of_its_own_state
from support.plan_changes import state_on as state_with_changes
from test_failed_copies import wait_for_room
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing.reductions import StorageWeakRef

import tierfs
from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.state_plan import StatePlan
from tierfs.device.drain import FINISH_S, drain_of
from tierfs.device.tier import device_tiers
from tierfs.errors import CorruptionError, InvalidInputError, StoreError

MIB = 1 << 20
STAGES = ["device", "lazy", "ram", "auto"]


def state_on(gpu, seed=0, large=3 * MIB):
    """Return large and small tensors of several dtypes on the device, and some on the host."""
    torch.manual_seed(seed)
    return {
        "model": {
            "large": gpu.own(torch.randn(large // 4)),
            "matrix": gpu.own(torch.randn(200, 257)).t(),
            "bf16": gpu.own(torch.randn(70_000).bfloat16()),
            "small": gpu.own(torch.randn(1000)),
            "bytes": gpu.own(torch.arange(77, dtype=torch.uint8)),
            "flags": gpu.own(torch.rand(33) > 0.5),
            "scalar": gpu.own(torch.tensor(3.5)),
            "empty": gpu.own(torch.empty(0, 3)),
        },
        "step": torch.tensor(7.0),
        "host": torch.randn(70_000),
        "note": "an object",
    }


def tensors_of(state):
    return [*state["model"].values(), state["step"], state["host"]]


def copied(state):
    return [tensor.detach().clone().cpu() for tensor in tensors_of(state)]


def change(gpu, state):
    """Change every tensor in place on the current stream, as an optimizer does."""
    for tensor in state["model"].values():
        gpu.launch(lambda tensor=tensor: tensor.fill_(1))


def save(writer, staged, url):
    dcp.save(staged, checkpoint_id=url, storage_writer=writer)


def loaded(gpu, state, url, reader=None, *, on_device=False):
    empty = {
        "model": {
            name: (gpu.own(torch.zeros_like(tensor)) if on_device else torch.zeros_like(tensor, device="cpu"))
            for name, tensor in state["model"].items()
        },
        "step": torch.zeros(()),
        "host": torch.zeros_like(state["host"]),
        "note": "",
    }
    dcp.load(empty, checkpoint_id=url, storage_reader=reader or TierReader(url), planner=TierLoadPlanner())
    gpu.synchronize()
    return copied(empty)


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def is_same(left, right):
    return all(
        one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_is_of_before_the_step_that_follows(gpu, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB")
    for number in range(3):
        state = state_on(gpu, seed=number)
        before = copied(state)
        staged = writer.stage(state)
        writer.fence()
        change(gpu, state)
        save(writer, staged, f"{url}/{number}")
        assert is_same(loaded(gpu, state, f"{url}/{number}"), before)


@pytest.mark.parametrize(  # plans know nothing of the schedule
    "gpu", [TRAINER_FIRST, pytest.param("gpu", marks=pytest.mark.cuda)], indirect=True
)
@pytest.mark.parametrize("change", [*FITTING.values(), *OTHERS.values()], ids=[*FITTING, *OTHERS])
def test_a_plan_of_the_last_save_does_not_outlive_a_change(gpu, url, change):
    check_each_save_is_of_its_own_state(change, url, TierWriter(url, device="64MiB"), gpu.own, gpu.launch)


def test_a_tensor_on_another_device_needs_another_plan(gpu):
    state = state_with_changes(gpu.own)
    plan, _ = StatePlan.of(state, {})
    assert plan.values_of(state, {}) is not None
    state["matrix"] = torch.randn(6, 8).t()
    assert plan.values_of(state, {}) is None


@pytest.mark.parametrize("stage", STAGES)
def test_async_saves_are_of_before_the_step(gpu, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB")
    state = state_on(gpu)
    before = copied(state)
    future = dcp.async_save(state, checkpoint_id=f"{url}/a", storage_writer=writer, async_stager=writer)
    writer.fence()
    change(gpu, state)
    future.result()
    assert is_same(loaded(gpu, state, f"{url}/a"), before)


def test_optimizers_wait_for_what_is_read_in_place(gpu, url):
    weight = torch.nn.Parameter(gpu.own(torch.randn(2 * MIB)))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    writer = TierWriter(url, stage="lazy")
    for number in range(3):
        weight.grad = torch.ones_like(weight)
        before = weight.detach().clone().cpu()
        staged = writer.stage({"weight": weight})
        optimizer.step()
        save(writer, staged, f"{url}/{number}")
        found = {"weight": torch.zeros(2 * MIB)}
        dcp.load(found, checkpoint_id=f"{url}/{number}", storage_reader=TierReader(url))
        assert torch.equal(found["weight"], before)


def test_the_step_is_ordered_behind_the_reads_in_place(fake, url):
    writer = TierWriter(url, stage="lazy")
    state = state_on(fake)
    (gate,) = gates_of(writer, state, url)
    before = copied(state)
    gate.close()
    staged = writer.stage(state)
    fake.may_wait.clear()  # the copies are queued, and the GPU is slow
    writer.fence()
    change(fake, state)
    fake.may_wait.set()
    gate.open()
    save(writer, staged, f"{url}/a")
    assert is_same(loaded(fake, state, f"{url}/a"), before)


def test_fence_does_not_hold_training_up_for_a_snapshot(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    state = state_on(fake)
    (gate,) = gates_of(writer, state, url)
    change(fake, state)  # unchanged blocks would come from the ram tier and pass no gate
    gate.close()
    staged = writer.stage(state)
    writer.fence()
    assert not staged.file.transfers[0][0].is_done
    gate.open()
    save(writer, staged, f"{url}/a")


def test_a_tensor_changed_without_a_fence_voids_the_save(fake, url):
    writer = TierWriter(url, stage="lazy")
    state = {"weight": fake.own(torch.randn(2 * MIB))}
    (gate,) = gates_of(writer, state, url)
    gate.close()
    staged = writer.stage(state)
    state["weight"].add_(1)
    gate.open()
    with pytest.raises(CheckpointException, match="changed while they were being saved"):
        save(writer, staged, f"{url}/a")
    with pytest.raises(CheckpointException, match="no checkpoint"):
        dcp.load({"weight": torch.zeros(2 * MIB)}, checkpoint_id=f"{url}/a", storage_reader=TierReader(f"{url}/a"))


def gates_of(writer, state, url):
    """Return the gates of the drain. A first save creates it."""
    save(writer, writer.stage(state), f"{url}/first")
    return writer.gates


def test_a_budget_that_is_too_small_degrades_to_ram(gpu, url, caplog):
    writer = TierWriter(url, stage="device", device="1MiB")
    state = state_on(gpu)
    for number in range(2):
        save(writer, writer.stage(state), f"{url}/{number}")
    said = [record for record in caplog.records if "device tier's budget" in record.getMessage()]
    assert len(said) == 1
    assert writer.status()["counters"]["process_device_tier"] == 2
    assert is_same(loaded(gpu, state, f"{url}/1"), copied(state))


def test_a_full_gpu_degrades_to_ram(fake, url):
    fake.left = 1000
    writer = TierWriter(url, stage="device", device="64MiB")
    state = state_on(fake)
    save(writer, writer.stage(state), f"{url}/a")
    assert writer.status()["counters"]["process_device_tier"] == 1
    assert is_same(loaded(fake, state, f"{url}/a"), copied(state))


def test_a_gpu_with_room_for_one_snapshot_takes_one(fake, url):
    fake.left = 12 * MIB
    writer = TierWriter(url, stage="device", device="64MiB")
    save(writer, writer.stage({"weight": fake.own(torch.randn(2 * MIB))}), f"{url}/a")
    assert writer.status()["tiers"]["device"]["generations"] == 1
    assert "process_device_tier" not in writer.status()["counters"]


def test_a_budget_that_is_no_size_is_named(url):
    with pytest.raises(InvalidInputError, match="device: 'x' is not a size"):
        TierWriter(url, device="x")


def test_device_needs_a_budget(fake, url):
    with pytest.raises(InvalidInputError, match="needs a budget"):
        TierWriter(url, stage="device").stage({"a": fake.own(torch.ones(3))})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("stage", ["device", "lazy"])
def test_modes_that_need_a_gpu_are_refused_without_one(url, stage):
    with pytest.raises(InvalidInputError, match="needs a GPU"):
        TierWriter(url, stage=stage, device="1GiB").stage({"a": torch.ones(3)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_auto_without_a_gpu_goes_to_ram_and_says_so_once(url, caplog):
    writer = TierWriter(url, device="1GiB")
    for number in range(2):
        save(writer, writer.stage({"a": torch.ones(3)}), f"{url}/{number}")
    assert sum("is on a GPU" in record.getMessage() for record in caplog.records) == 1


def test_the_budget_comes_from_the_environment(fake, url, monkeypatch):
    monkeypatch.setenv("TIERFS_DEVICE", "32MiB")
    writer = TierWriter(url)
    save(writer, writer.stage(state_on(fake)), f"{url}/a")
    tier = writer.status()["tiers"]["device"]
    assert tier["budget_bytes"] == 32 * MIB
    assert tier["generations"] == 2


@pytest.mark.parametrize("value", ["rubbish", "0"])
def test_an_invalid_piece_is_named(fake, url, monkeypatch, value):
    monkeypatch.setenv("TIERFS_DEVICE_PIECE", value)
    writer = TierWriter(url, stage="device", device="64MiB")
    with pytest.raises(CheckpointException, match="TIERFS_DEVICE_PIECE"):
        save(writer, writer.stage({"weight": fake.own(torch.ones(3))}), f"{url}/a")


def test_staging_during_graph_capture_raises(fake, url):
    fake.capturing = True
    with pytest.raises(InvalidInputError, match="captured"):
        TierWriter(url, stage="lazy").stage({"a": fake.own(torch.ones(3))})


def test_a_third_save_while_two_drain_goes_to_ram(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    states = [state_on(fake, seed) for seed in range(4)]
    (gate,) = gates_of(writer, states[0], url)
    gate.close()
    first, second = (writer.stage(state) for state in states[1:3])
    opened = threading.Timer(0.2, gate.open)
    opened.start()
    third = writer.stage(states[3])
    assert writer.status()["counters"]["process_device_tier"] == 1
    for number, staged in enumerate([first, second, third]):
        save(writer, staged, f"{url}/{number}")
        assert is_same(loaded(fake, states[number + 1], f"{url}/{number}"), copied(states[number + 1]))


def test_unchanged_chunks_do_not_cross_the_link(gpu, url):
    if not gpu.has_kernels:
        pytest.skip("CuPy is missing")
    writer = TierWriter(url, stage="device", device="256MiB")
    frozen = gpu.own(torch.randn(3 * 4 * MIB))
    trained = gpu.own(torch.randn(4 * MIB))
    for number in range(2):
        before = writer.status()["tiers"]["device"]["drained_bytes"] if number else 0
        save(writer, writer.stage({"a.frozen": frozen, "b.trained": trained}), f"{url}/{number}")
        drained = writer.status()["tiers"]["device"]["drained_bytes"] - before
        want = [frozen.cpu().clone(), trained.cpu().clone()]
        gpu.launch(lambda: trained.add_(1))
        gpu.synchronize()
    assert drained == 16 * MIB
    assert writer.status()["tiers"]["device"]["skipped_bytes"] == 3 * 16 * MIB
    found = {"a.frozen": torch.zeros(3 * 4 * MIB), "b.trained": torch.zeros(4 * MIB)}
    dcp.load(found, checkpoint_id=f"{url}/1", storage_reader=TierReader(url))
    assert is_same(list(found.values()), want)


def test_bytes_that_change_on_the_link_void_the_save(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    staged = writer.stage(state_on(fake))
    staged["note"]  # waits until the copies are done
    fake.corrupt = True
    staged = writer.stage(state_on(fake, 1))
    with pytest.raises(CheckpointException, match="changed between the GPU and host memory") as raised:
        save(writer, staged, f"{url}/a")
    assert any(isinstance(error, CorruptionError) for error, _ in raised.value.failures.values())


def test_a_failed_copy_fails_the_save_and_not_training(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    fake.fetch_error = RuntimeError("CUDA error: unspecified launch failure")
    staged = writer.stage(state_on(fake))
    with pytest.raises(CheckpointException, match="unspecified launch failure"):
        save(writer, staged, f"{url}/a")
    fake.fetch_error = None
    state = state_on(fake, 1)
    save(writer, writer.stage(state), f"{url}/b")
    assert is_same(loaded(fake, state, f"{url}/b"), copied(state))


def test_memory_that_cannot_be_pinned_is_used_and_counted(fake, url, caplog):
    fake.can_pin = False
    writer = TierWriter(url, stage="device", device="64MiB")
    state = state_on(fake)
    for number in range(2):
        save(writer, writer.stage(state), f"{url}/{number}")
    tier = writer.status()["tiers"]["device"]
    assert tier["registered_bytes"] == 0
    assert tier["unpinned"] >= 1
    assert sum("cannot be registered" in record.getMessage() for record in caplog.records) == 1
    assert is_same(loaded(fake, state, f"{url}/1"), copied(state))


def test_many_saves_leave_registered_bytes_and_generations_flat(gpu, url):
    writer = TierWriter(url, stage="device", device="64MiB", ram="192MiB")
    state = state_on(gpu)
    for number in range(20):
        save(writer, writer.stage(state), f"{url}/{number % 3}")
        writer.wait("object", 60)
        tier = writer.status()["tiers"]["device"]
        assert tier["registered_bytes"] <= 192 * MIB
        assert tier["used_bytes"] <= 64 * MIB
        assert tier["generations"] == 2


def test_segments_are_unregistered_when_they_go(fake, url):
    writer = TierWriter(url, stage="ram")
    save(writer, writer.stage(state_on(fake)), f"{url}/a")
    assert fake.pinned
    store, _ = Address.of(url, {}).open()
    store.tiers.wait("", tierfs_level("object"), 60)
    store.tiers.ram.close()
    drain_of(fake).pins.sweep()
    assert not fake.pinned


def tierfs_level(name):
    from tierfs.host.pending.levels import Level

    return Level.parse(name)


def test_a_state_that_is_given_up_is_not_written_to_any_more(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    (gate,) = gates_of(writer, state_on(fake), url)
    gate.close()
    staged = writer.stage(state_on(fake, 1))
    staged.file.abort()
    gate.open()
    with pytest.raises(StoreError, match="discarded"):
        staged.file.wait_filled()
    del staged
    gc.collect()
    state = state_on(fake, 2)
    save(writer, writer.stage(state), f"{url}/b")
    assert is_same(loaded(fake, state, f"{url}/b"), copied(state))


@pytest.mark.parametrize("stage", ["device", "lazy", "ram"])
def test_room_of_a_state_that_nobody_saves_is_given_back(fake, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB")
    save(writer, writer.stage(state_on(fake)), f"{url}/a")
    gc.collect()
    gc.disable()
    try:
        staged = writer.stage(state_on(fake, 1))
        staged["note"]
        del staged
        wait_for_room(writer)
    finally:
        gc.enable()


def test_a_closed_gate_holds_a_drain_up_for_a_bounded_time(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    drain_of(fake)._finish_s = 0.3
    drain_of(fake).gate.close()
    begun = time.monotonic()
    save(writer, writer.stage(state_on(fake)), f"{url}/a")
    assert time.monotonic() - begun >= 0.3


def test_rollback_takes_a_save_from_the_device_tier(gpu, url):
    if not gpu.has_kernels:
        pytest.skip("CuPy is missing")
    writer = TierWriter(url, stage="device", device="64MiB")
    state = state_on(gpu)
    before = copied(state)
    save(writer, writer.stage(state), f"{url}/a")
    change(gpu, state)
    reader = TierReader(f"{url}/a")
    assert is_same(loaded(gpu, state, f"{url}/a", reader, on_device=True), before)
    on_device = sum(tensor.nbytes for tensor in state["model"].values())
    assert reader.device_bytes == on_device


def test_no_rollback_into_elements_that_share_memory(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    save(writer, writer.stage({"weight": fake.own(torch.randn(4, 5))}), f"{url}/a")
    found = {"weight": fake.own(torch.zeros(4, 1)).expand(4, 5)}
    with pytest.raises(CheckpointException, match=r"weight: the destination's elements share memory"):
        dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url), planner=TierLoadPlanner())


def test_no_rollback_into_a_sparse_tensor(fake, url, monkeypatch):
    writer = TierWriter(url, stage="device", device="64MiB")
    save(writer, writer.stage({"weight": fake.own(torch.randn(4, 5))}), f"{url}/a")
    found = {"weight": torch.zeros(4, 5).to_sparse()}
    monkeypatch.setattr(fake, "owns", lambda tensor: True)
    with pytest.raises(CheckpointException, match=r"weight: the destination's layout is torch.sparse_coo"):
        dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))


def test_a_replaced_snapshot_is_loaded_from_the_next_tier(gpu, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    saved = []
    for number in range(3):
        state = state_on(gpu, number)
        saved.append(copied(state))
        save(writer, writer.stage(state), f"{url}/{number}")
    for number in range(3):
        reader = TierReader(f"{url}/{number}")
        assert is_same(loaded(gpu, state, f"{url}/{number}", reader, on_device=True), saved[number])
        assert bool(reader.device_bytes) == (number > 0 and gpu.has_kernels)


def test_a_damaged_snapshot_is_loaded_from_the_next_tier(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    state = state_on(fake)
    before = copied(state)
    save(writer, writer.stage(state), f"{url}/a")
    (tier,) = device_tiers()
    for generation in tier.generations:
        generation.memory[12345] ^= 4
    reader = TierReader(f"{url}/a")
    assert is_same(loaded(fake, state, f"{url}/a", reader, on_device=True), before)
    assert reader.device_bytes == 0


def test_a_snapshot_alone_is_at_level_none(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    (gate,) = gates_of(writer, state_on(fake), url)
    gate.close()
    staged = writer.stage(state_on(fake, 1))
    tier = writer.status()["tiers"]["device"]
    assert tier["gives"] == "none"
    assert tier["snapshots"] == 2
    gate.open()
    save(writer, staged, f"{url}/b")


@pytest.mark.parametrize(
    "copy_of",
    [
        dict,
        lambda staged: {**staged},
        lambda staged: staged.copy(),
        lambda staged: pickle.loads(pickle.dumps(staged)),
        copy.deepcopy,
    ],
    ids=["dict", "stars", "copy", "pickle", "deepcopy"],
)
def test_a_copy_of_what_was_staged_holds_its_tensors(fake, url, copy_of):
    writer = TierWriter(url, stage="device", device="64MiB")
    state = state_on(fake)
    before = copied(state)
    found = copy_of(writer.stage(state))
    assert is_same(copied(found), before)


def test_saves_overlap(gpu, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    states = [state_on(gpu, seed) for seed in range(5)]
    staged = [(number, writer.stage(state)) for number, state in enumerate(states)]
    for number, one in reversed(staged):
        save(writer, one, f"{url}/{number}")
    for number, state in enumerate(states):
        assert is_same(loaded(gpu, state, f"{url}/{number}"), copied(state))


def test_unstaged_tensors_are_copied_at_once(gpu, url):
    state = state_on(gpu)
    dcp.save(state, checkpoint_id=f"{url}/a", storage_writer=TierWriter(url))
    assert is_same(loaded(gpu, state, f"{url}/a"), copied(state))
    assert is_same(loaded(gpu, state, f"{url}/a", on_device=True), copied(state))


@pytest.mark.usefixtures("url")  # the host is its own
def test_other_processes_see_the_device_tier_in_status(fake, tmp_path):
    import json
    import subprocess
    import sys

    tierfs.init(f"file://{tmp_path}/store")
    url = f"tierfs::file://{tmp_path}/store"
    writer = TierWriter(url, stage="device", device="64MiB")
    save(writer, writer.stage(state_on(fake)), f"{url}/a")
    command = [sys.executable, "-m", "tierfs.cli", "status", url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "device" in text
    assert "1 of 2 snapshots" in text
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert found["tiers"]["device"]["budget_bytes"] == 64 * MIB
    metrics = subprocess.run([*command, "--prometheus"], capture_output=True, text=True, check=True).stdout
    assert 'tierfs_tier_snapshots{store="' in metrics


@pytest.mark.parametrize(("stage", "seed"), list(itertools.product(["device", "lazy"], range(2))))
def test_random_saves_crashes_and_rollbacks(gpu, url, stage, seed):
    import random

    dice = random.Random(seed)
    print(f"seed {seed}")
    writer = TierWriter(url, stage=stage, device=dice.choice(["24MiB", "64MiB"]))
    state = state_on(gpu, seed)
    published = {}
    waiting = []
    for number in range(10):
        what = dice.choice(["save", "stage", "finish", "change", "crash", "load", "change"])
        if what in {"save", "stage"} and len(waiting) < 2:
            gpu.synchronize()
            before = copied(state)
            waiting.append((number, writer.stage(state), before))
            writer.fence()
        if what in {"save", "finish"} and waiting:
            name, staged, before = waiting.pop(0)
            save(writer, staged, f"{url}/{name}")
            published[name] = before
        if what == "change":
            value = dice.random()
            for tensor in state["model"].values():
                gpu.launch(lambda tensor=tensor, value=value: tensor.fill_(value))
        if what == "crash":  # the staged state is never saved
            waiting.clear()
            gc.collect()
        if what == "load" and published:
            name = dice.choice(sorted(published))
            on_device = dice.random() < 0.7
            assert is_same(loaded(gpu, state, f"{url}/{name}", on_device=on_device), published[name])
    for name, before in published.items():
        assert is_same(loaded(gpu, state, f"{url}/{name}", on_device=True), before)


@pytest.mark.parametrize("call", ["hash", "copy", "record"])
@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("the GPU is full"), StoreError("no compiler")], ids=["memory", "compiler"]
)
def test_a_rollback_that_the_gpu_refuses_is_loaded_from_ram(fake, url, monkeypatch, call, error):
    writer = TierWriter(url, stage="device", device="64MiB")
    state = {"weight": fake.own(torch.randn(2 * MIB))}
    save(writer, writer.stage(state), f"{url}/a")
    found = {"weight": fake.own(torch.zeros(2 * MIB))}
    reader = TierReader(f"{url}/a")
    work, calls = getattr(fake, call), []

    def refuse_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise error
        return work(*args)

    monkeypatch.setattr(fake, call, refuse_once)
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=reader)
    assert torch.equal(found["weight"], state["weight"])
    assert reader.device_bytes == 0
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=reader)
    assert reader.device_bytes == 8 * MIB


def test_a_larger_slab_replaces_the_old_one_at_once(fake, url):
    writer = TierWriter(url, stage="device", device="24MiB")
    staged = writer.stage({"weight": fake.own(torch.randn(2 * MIB))})
    save(writer, staged, f"{url}/a")
    (tier,) = device_tiers()
    slab = StorageWeakRef(tier.generations[0].memory.untyped_storage())
    fake.owned.clear()
    allocate, gone = fake.allocate, []
    fake.allocate = lambda length: (gone.append(slab.expired()), allocate(length))[1]
    writer.stage({"weight": fake.own(torch.randn(5 * MIB))})
    assert gone == [True]
    assert isinstance(staged, dict)  # the caller still has it


def test_a_step_hurries_all_saves_behind_a_closed_gate(fake, url):
    writer = TierWriter(url, stage="lazy")
    state = {"weight": fake.own(torch.randn(2 * MIB))}
    gate = drain_of(fake).gate
    gate.close()
    staged = [writer.stage(state) for _ in range(6)]
    begun = time.monotonic()
    writer.fence()
    assert time.monotonic() - begun < FINISH_S
    gate.open()
    for number, one in enumerate(staged):
        save(writer, one, f"{url}/{number}")


def test_a_copy_that_training_waits_for_passes_a_closed_gate(fake, url):
    writer = TierWriter(url, stage="device", device="9MiB")  # room for one snapshot
    gate = drain_of(fake).gate
    gate.close()
    begun = time.monotonic()
    staged = [writer.stage({"weight": fake.own(torch.randn(2 * MIB))}) for _ in range(2)]
    assert time.monotonic() - begun < FINISH_S
    gate.open()
    for number, one in enumerate(staged):
        save(writer, one, f"{url}/{number}")


def test_an_interrupt_during_a_copy_reaches_the_caller(fake, url, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "fetch", interrupt)
    writer = TierWriter(url, stage="ram")
    with pytest.raises(KeyboardInterrupt):
        writer.stage({"weight": fake.own(torch.randn(2 * MIB))})
    wait_for_room(writer)


@pytest.mark.parametrize(
    "read",
    [
        lambda staged: (staged | {"b": 1})["a"],
        lambda staged: ({"b": 1} | staged)["a"],
        lambda staged: staged.pop("a"),
        lambda staged: staged.popitem()[1],
        lambda staged: staged.setdefault("a"),
    ],
    ids=["or", "ror", "pop", "popitem", "setdefault"],
)
def test_a_tensor_leaves_a_staged_state_when_it_is_there(fake, url, read, monkeypatch):
    tensor = fake.own(torch.randn(100))
    make_room, may_go_on = ShardFile.make_room, threading.Event()
    writer = TierWriter(url, stage="device", device="64MiB")
    monkeypatch.setattr(ShardFile, "make_room", lambda *args: may_go_on.wait() and make_room(*args))
    staged = writer.stage({"a": tensor})
    threading.Timer(0.2, may_go_on.set).start()
    assert torch.equal(read(staged), tensor)
