"""TierWriter saves exactly the given state, whatever happens right after, and publishes it whole or not at all."""

import copy
import functools
import gc
import io
import json
import pickle
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load as load_safetensors
from support.held_planner import Held
from support.opened import descriptors
from support.waiting import HANG_S, until
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, SerializationFormat
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.utils._pytree import tree_map_only

import tierfs
from tierfs.checkpoint.verify import verify_checkpoint
from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.dcp.save import copy as copying
from tierfs.dcp.save.copy import LARGE_BYTES
from tierfs.dcp.save.plan import sizes_of
from tierfs.dcp.save.shard_file import ShardFile, staged_in
from tierfs.errors import AlreadyExistsError, CapacityError, InvalidInputError, NotFoundError
from tierfs.format.checkpoint import SaveMark
from tierfs.host.pending.levels import Level
from tierfs.host.slab.table import SlotState
from tierfs.store import Writer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning"),
]

OPTIONS = {"ram": "256MiB", "nvme": "0"}
MIB = 1 << 20
# All dtypes that are at least one byte wide and consist of their elements alone. torch 2.14 can neither fill a
# bcomplex32 nor conjugate it.
_ODD = re.compile(r"bits|quint|qint|u?int[1-7]$|fn_x2|bcomplex32")
DTYPES = sorted(
    {
        kind
        for name in dir(torch)
        if isinstance(kind := getattr(torch, name), torch.dtype) and not _ODD.search(str(kind))
    },
    key=str,
)


def noise(*shape, dtype=torch.float32, seed=0):
    count = torch.Size(shape).numel() * dtype.itemsize
    # A clone, since torch cannot resize memory that NumPy owns.
    raw = torch.from_numpy(np.random.SFC64(seed).random_raw(-(-count // 8)).view(np.uint8)[:count]).clone()
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = (plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain).contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bits(first) == bits(second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def state(seed=0):
    return {
        "model": {
            "embedding": noise(3000, 500, seed=seed),
            "layers": [
                {"weight": noise(40, 30, dtype=torch.bfloat16, seed=seed + n), "bias": noise(40, seed=n)}
                for n in range(3)
            ],
            "transposed": noise(300, 20, seed=seed).t(),
            "view": noise(100, 100, seed=seed)[10:20, ::3],
            "conjugate": noise(9, dtype=torch.complex64, seed=seed).conj(),
            "negative": noise(7, dtype=torch.complex64, seed=seed).conj().imag,
            "nothing": torch.empty(0, 4),
            "scalar": torch.tensor(float(seed)),
            "parameter": torch.nn.Parameter(noise(10, seed=seed)),
        },
        "step": seed,
        "notes": ["a", {"b": seed}],
    }


def empty_like(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: empty_like(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(empty_like, value))
    return None


@pytest.fixture
def url(tmp_path):
    """The URL of a checkpoint in memory: the flusher is a thread, which starts sooner than a process."""
    tierfs.init(f"memory://{tmp_path}/store")
    yield f"tierfs::memory://{tmp_path}/store/run"
    # Pending data keeps its room until it is flushed.
    TierWriter(f"tierfs::memory://{tmp_path}/store", **OPTIONS).wait("object")


class Trusting(dcp.DefaultLoadPlanner):
    """Unpickles anything, like torch's own planner. A caller that derives a planner asks for that."""


def loaded(url, like):
    found = empty_like(like)
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS), planner=Trusting())
    return found


def slot_states(url):
    store, _ = Address.of(url, OPTIONS).open()
    return {slot.state for segment in store.tiers.ram.segments() for slot in segment.slots()}


def test_every_dtype_comes_back_bit_for_bit(url):
    saved = {}
    for dtype in DTYPES:
        saved[str(dtype)] = {
            "plain": noise(33, dtype=dtype),
            "scalar": noise(dtype=dtype),
            "none": noise(0, 2, dtype=dtype),
            "large": noise(LARGE_BYTES // dtype.itemsize + 3, dtype=dtype),
        }
        saved[str(dtype)]["strided"] = noise(12, 8, dtype=dtype)[::2, 1:5]
        large = noise(1100 // dtype.itemsize + 1, 2000, dtype=dtype)
        saved[str(dtype)]["large, strided"] = large[:, 1::2]
        saved[str(dtype)]["large, transposed"] = large.t()
        if dtype.is_complex:
            imaginary = noise(LARGE_BYTES // dtype.itemsize * 2, dtype=dtype).conj().imag
            saved[str(dtype)]["large, negative"] = imaginary
            saved[str(dtype)]["large, negative, contiguous"] = torch._neg_view(imaginary.resolve_neg().contiguous())
            saved[str(dtype)]["large, conjugate"] = noise(LARGE_BYTES // dtype.itemsize * 2, dtype=dtype).conj()
    writer = TierWriter(url, **OPTIONS)
    dcp.async_save(saved, storage_writer=writer).result()
    found = loaded(url, saved)
    assert [dtype for dtype in saved if not same(found[dtype], saved[dtype])] == []


def test_changes_after_staging_are_not_saved(url):
    writer = TierWriter(url, **OPTIONS)
    live = state(1)
    live["array"] = torch.arange(6).numpy()
    expected = copy.deepcopy(live)
    staged = writer.stage(live)
    for tensor in [live["model"]["embedding"], live["model"]["parameter"].data, live["model"]["layers"][0]["bias"]]:
        tensor.zero_()
    live["notes"].append("too late")
    live["array"][:] = 0
    dcp.save(staged, storage_writer=writer)
    found = loaded(url, expected)
    found["array"], expected["array"] = found["array"].tolist(), expected["array"].tolist()
    assert same(found, expected)


class Frame:
    """Like a data frame: a deep copy of it shares its cells."""

    def __init__(self, cells):
        self.cells = cells

    def __deepcopy__(self, memo):
        return Frame(self.cells)


@pytest.mark.parametrize("place", ["alone", "in a list", "in a tuple", "in an array"])
def test_objects_are_saved_as_they_were_when_they_were_staged(url, place):
    frame = Frame([[1], torch.ones(2, requires_grad=True) * 2])
    array = np.empty(1, object)
    array[0] = frame
    live = {
        "x": {"alone": frame, "in a list": [frame, torch.ones(1)], "in a tuple": (frame, 1), "in an array": array}[
            place
        ],
        "set": {1, "a"},
    }
    future = dcp.async_save(live, storage_writer=TierWriter(url, **OPTIONS))
    frame.cells[0].append("too late")
    with torch.no_grad():
        frame.cells[1].zero_()
    live["set"].add("too late")
    future.result()
    found = {"x": [0, torch.zeros(1)] if place == "in a list" else 0, "set": 0}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS), planner=Trusting())
    x = found["x"] if place == "alone" else found["x"][0]
    assert (x.cells[0], x.cells[1].tolist(), found["set"]) == ([1], [2, 2], {1, "a"})


class Node:
    def __init__(self, shared):
        self.shared = shared


@pytest.mark.parametrize("kind", [Node, Frame])
def test_shared_objects_stay_shared_in_a_checkpoint(url, kind):
    first, second = kind([bytes(200_000)]), kind([])
    second.other, first.other = first, second
    live = {
        "ring": [first, second],
        "many": [kind(first) for _ in range(100)],
        "pair": (Node(tensor := torch.ones(3)), tensor),
    }
    writer = TierWriter(url, **OPTIONS)
    dcp.async_save(live, storage_writer=writer).result()
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    (shard,) = fs.glob(f"{path}/*.safetensors")
    assert fs.size(shard) < 1_000_000
    found = dict.fromkeys(live)
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS), planner=Trusting())
    assert found["ring"][0].other is found["ring"][1]
    assert found["ring"][1].other is found["ring"][0]
    node, tensor = found["pair"]
    assert node.shared.data_ptr() == tensor.data_ptr()


def test_staged_tensors_are_saved_without_a_copy(url, monkeypatch):
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage({"a": noise(1000, 1000), "b": noise(10)})
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: copied.append(lists))
    monkeypatch.setattr(copying, "copy_piece", lambda *piece: copied.append(piece))
    dcp.save(staged, storage_writer=writer)
    assert copied == []
    assert same(loaded(url, staged), {"a": noise(1000, 1000), "b": noise(10)})


class Shown(torch.Tensor):
    """Shows the values of another tensor, whatever its own memory holds, if it has any."""

    @staticmethod
    def __new__(cls, shown, own):
        made = (
            torch.Tensor._make_wrapper_subclass(cls, shown.size(), dtype=shown.dtype)
            if own is None
            else torch.Tensor._make_subclass(cls, own)
        )
        made.shown = shown
        return made

    @classmethod
    def __torch_dispatch__(cls, function, _, arguments=(), named=None):
        arguments, named = tree_map_only(cls, lambda one: one.shown, (arguments, named or {}))
        return function(*arguments, **named)


LARGE = LARGE_BYTES // 4 + 10


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: Shown(noise(LARGE), None), noise(LARGE)),
        (lambda: Shown(noise(LARGE), torch.zeros(LARGE)), noise(LARGE)),
        (lambda: torch._efficientzerotensor((LARGE,)), torch.zeros(LARGE)),
        (lambda: torch._efficientzerotensor((LARGE + 10,))[10:], torch.zeros(LARGE)),
    ],
    ids=["wrapped", "elsewhere", "zeros", "view of zeros"],
)
@pytest.mark.parametrize("is_staged", [False, True])
def test_tensors_with_unusual_memory_are_saved_by_value(url, make, shown, is_staged):
    writer = TierWriter(url, **OPTIONS)
    if is_staged:
        dcp.async_save({"a": make()}, storage_writer=writer).result()
    else:
        dcp.save({"a": make()}, storage_writer=writer)
    assert same(loaded(url, {"a": shown}), {"a": shown})


def test_a_view_whose_memory_was_freed_is_refused(url):
    view = torch.zeros(LARGE + 10)[10:]
    view.untyped_storage().resize_(0)
    with pytest.raises(dcp.api.CheckpointException, match="memory was freed"):
        dcp.async_save({"a": view}, storage_writer=TierWriter(url, **OPTIONS)).result()


def test_large_tensors_are_copied_past_the_caches(url, monkeypatch):
    copied, real = [], copying.copy_piece
    monkeypatch.setattr(copying, "copy_piece", lambda *piece: copied.append(piece[2]) or real(*piece))
    staged = TierWriter(url, **OPTIONS).stage({"a": noise(LARGE), "b": noise(10)})
    assert sum(copied) == 4 * LARGE
    assert same(staged["a"], noise(LARGE))


def test_a_staged_tensor_that_is_written_to_is_saved_as_it_is_by_then(url):
    # A planner may write to it in any way. torch does not count all of these writes.
    writer = TierWriter(url, ack="object", **OPTIONS)
    staged = writer.stage({"large": noise(3000, 3000), "small": noise(10)})
    staged["large"].data.zero_()
    staged["small"][3:].zero_()
    expected = copy.deepcopy(dict(staged))
    dcp.save(staged, storage_writer=writer)
    assert same(loaded(url, expected), expected)


def test_a_dropped_staged_state_frees_its_slots(url):
    writer = TierWriter(url, **OPTIONS)
    for _ in range(8):  # more than there is room for
        staged = writer.stage({"large": noise(3000, 3000)})
        del staged
    store, _ = Address.of(url, OPTIONS).open()
    dcp.save({"large": noise(3000, 3000, seed=1)}, storage_writer=writer)
    assert store.tiers.counters["overflow"] == 0
    assert same(loaded(url, {"large": noise(3000, 3000)}), {"large": noise(3000, 3000, seed=1)})


def test_staged_tensors_are_found_in_every_run(url):
    writer = TierWriter(url, **OPTIONS)
    live = {f"large{number}": noise(600, 500, seed=number) for number in range(5)} | {"small": noise(10)}
    staged = writer.stage(live)
    for name, tensor in staged.items():
        _, (_, placed) = staged_in(tensor)
        assert (placed.name, placed.length) == (name, tensor.nbytes)
        _, (_, part) = staged_in(tensor[3:7])
        assert (part.name, part.at - placed.at, part.length) == (name, tensor[:3].nbytes, tensor[3:7].nbytes)
        assert staged_in(live[name]) is None


def test_a_cached_plan_saves_new_content_each_time(url):
    writer, planner = TierWriter(url, **OPTIONS), DefaultSavePlanner(enable_plan_caching=True)
    for number in range(3):
        dcp.save(state(number), storage_writer=writer, checkpoint_id=f"{url}/{number}", planner=planner)
    for number in range(3):
        assert same(loaded(f"{url}/{number}", state(number)), state(number))


def test_a_cached_plan_of_another_dtype_is_no_plan(url):
    writer, planner = TierWriter(url, **OPTIONS), DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"x": noise(9, dtype=torch.float16)}, storage_writer=writer, planner=planner)
    with pytest.raises(
        dcp.api.CheckpointException, match=r"x is torch.bfloat16 \[9\], but torch.float16 \[9\] in the plan"
    ):
        dcp.save({"x": noise(9, dtype=torch.bfloat16)}, storage_writer=writer, planner=planner)
    assert same(loaded(url, {"x": noise(9, dtype=torch.float16)}), {"x": noise(9, dtype=torch.float16)})


def test_a_state_staged_for_one_store_saves_to_another(url, tmp_path):
    tierfs.init(f"file://{tmp_path}/other")
    other = f"tierfs::file://{tmp_path}/other/run"
    writer = TierWriter(url, **OPTIONS)
    dcp.async_save(state(1), storage_writer=writer, checkpoint_id=other).result()
    assert same(loaded(other, state(1)), state(1))
    writer.wait("object")
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    assert not fs.exists(path)


def check_refused(writer):
    for ask in (lambda: writer.wait("object"), writer.ack):
        with pytest.raises(NotFoundError, match="has not finished in this process"):
            ask()


def check_reached(writer):
    writer.wait("object")
    assert writer.ack() == "object"


HELD_AT = ["set_up_planner", "resolve_data"]


@pytest.mark.parametrize("step", HELD_AT)
@pytest.mark.parametrize("slow", [0, 1])
def test_no_save_is_taken_for_another_that_overlaps(url, step, slow):
    writer, held = TierWriter(url, **OPTIONS), Held(step)
    planners = [held, None] if slow == 0 else [None, held]
    if slow:  # neither save has begun when the second is staged
        planners[0] = Held("set_up_planner")
    saving = []
    try:
        for number, planner in enumerate(planners):
            target = f"{url}/{number}"
            saving.append(dcp.async_save(state(number), storage_writer=writer, checkpoint_id=target, planner=planner))
        assert held.arrived.wait(HANG_S)
        if slow:
            planners[0].go_on.set()
        saving[1 - slow].result()
        (check_refused if slow else check_reached)(writer)
    finally:
        for planner in planners:
            if planner is not None:
                planner.go_on.set()
    saving[slow].result()
    writer.wait("object")
    assert writer.ack() == "object"
    assert writer.save_id == TierReader(f"{url}/{slow}", **OPTIONS).read_metadata().storage_meta.save_id
    for number in range(2):
        assert same(loaded(f"{url}/{number}", state(number)), state(number))


@pytest.mark.parametrize("step", HELD_AT)
def test_a_save_that_failed_after_a_later_one_keeps_nobody_waiting(url, step):
    writer, held = TierWriter(url, **OPTIONS), Held(step)
    held.error = RuntimeError("not this one")
    first = dcp.async_save(state(1), storage_writer=writer, checkpoint_id=f"{url}/1", planner=held)
    try:
        assert held.arrived.wait(HANG_S)
        dcp.async_save(state(2), storage_writer=writer, checkpoint_id=f"{url}/2").result()
        check_reached(writer)
    finally:
        held.go_on.set()
    with pytest.raises(dcp.api.CheckpointException, match="not this one"):
        first.result()
    writer.wait("object")
    assert TierWriter(f"{url}/2", **OPTIONS).ack() == writer.ack() == "object"


def test_reading_a_staged_state_does_not_claim_another_save(url):
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage(state(1))
    assert dict(staged.items()).keys() == state(1).keys()
    dcp.save(state(2), storage_writer=writer, checkpoint_id=f"{url}/2")
    check_reached(writer)
    assert writer.save_id == TierReader(f"{url}/2", **OPTIONS).read_metadata().storage_meta.save_id
    dcp.save(staged, storage_writer=writer, checkpoint_id=f"{url}/1")
    writer.wait("object")


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_planner_that_asks_for_a_level_is_refused_and_its_save_goes_on(url, how):
    writer, target = TierWriter(url, **OPTIONS), f"{url}/2"
    dcp.save(state(1), storage_writer=writer, checkpoint_id=f"{url}/1")

    class Asking(DefaultSavePlanner):
        def resolve_data(self, write_item):
            check_refused(writer)
            return super().resolve_data(write_item)

    saving = getattr(dcp, how)(state(2), storage_writer=writer, checkpoint_id=target, planner=Asking())
    if how == "async_save":
        saving.result()
    writer.wait("object")
    assert writer.save_id == TierReader(target, **OPTIONS).read_metadata().storage_meta.save_id
    assert same(loaded(target, state(2)), state(2))


def test_metadata_of_an_earlier_save_are_not_taken_for_those_of_one_that_failed(url, monkeypatch):
    writer = TierWriter(url, **OPTIONS)
    earlier = [dcp.save(state(1), storage_writer=writer, checkpoint_id=f"{url}/{number}") for number in range(2)]
    for number in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(TierWriter, "finish", lambda *_, **__: 1 / 0)
            with pytest.raises(dcp.api.CheckpointException, match="division by zero"):
                dcp.save(state(2), storage_writer=writer, checkpoint_id=f"{url}/{number}")
        assert pickle.loads(pickle.dumps(earlier[number])).storage_meta == earlier[number].storage_meta
        check_refused(writer)


def test_a_copy_that_failed_keeps_nobody_waiting_for_later_saves(url):
    class Uncopyable:
        def __deepcopy__(self, memo):
            raise RuntimeError("not this one")

    writer = TierWriter(url, **OPTIONS)
    with pytest.raises(InvalidInputError, match="not this one") as kept:
        dcp.async_save({**state(1), "odd": Uncopyable()}, storage_writer=writer)
    check_refused(writer)
    dcp.async_save(state(2), storage_writer=writer).result()
    writer.wait("object")
    assert kept.tb is not None


def test_a_staged_state_in_another_dict_is_one_save(url):
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage(state(1))
    check_refused(writer)
    dcp.save({**staged}, storage_writer=writer)
    writer.wait("object")
    staged = writer.stage(state(2))
    dcp.save(staged, storage_writer=writer, checkpoint_id=f"{url}/2")
    writer.wait("object")
    assert same(loaded(f"{url}/2", state(2)), state(2))


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_save_that_failed_is_not_waited_for(url, how):
    writer = TierWriter(url, overwrite=False, **OPTIONS)
    dcp.save(state(1), storage_writer=writer, checkpoint_id=f"{url}/1")
    with pytest.raises(dcp.api.CheckpointException, match="overwrite=True"):
        saving = getattr(dcp, how)(state(2), storage_writer=writer, checkpoint_id=f"{url}/1")
        saving.result()
    with pytest.raises(NotFoundError, match="raises its error if it failed"):
        writer.wait("object")
    dcp.async_save(state(2), storage_writer=writer, checkpoint_id=f"{url}/2").result()
    writer.wait("object")


def test_metadata_name_the_save_and_the_load_as_torchs_do(url):
    writer, reader = TierWriter(url), TierReader(url)
    assert writer.save_id is None
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    loads = [reader.load_id]
    meta = reader.read_metadata().storage_meta
    assert (meta.checkpoint_id, meta.save_id, meta.load_id) == (writer.checkpoint_id, writer.save_id, loads[0])
    reader.reset()
    assert reader.read_metadata().storage_meta.load_id == reader.load_id != loads[0]


def test_a_state_staged_in_private_memory_is_saved_without_local_tiers(url):
    staged = TierWriter(url, ram="0", nvme="0").stage(state(1))
    dcp.save(staged, storage_writer=TierWriter(url, ram="0", nvme="0"), checkpoint_id=f"{url}/1")
    assert same(loaded(f"{url}/1", state(1)), state(1))


def test_planners_are_told_the_id_of_the_save(url):
    told = []

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            told.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer = TierWriter(url)
    for _ in range(2):
        dcp.save(
            {"a": torch.ones(3)},
            storage_writer=writer,
            planner=Planner(),
            checkpoint_id=f"{url}/a",
            no_dist=True,
        )
        assert (told[-1].checkpoint_id, told[-1].save_id) == (writer.checkpoint_id, writer.save_id)
    assert told[0].save_id != told[1].save_id


def test_a_save_that_was_removed_did_not_reach_the_object_tier(url):
    writer = TierWriter(url, **OPTIONS)
    dcp.save(state(1), storage_writer=writer)
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    fs.rm(path, recursive=True)
    with pytest.raises(NotFoundError, match="removed"):
        writer.wait("object")


def test_an_announced_save_that_cannot_be_read_does_not_keep_the_checkpoint_from_being_loaded(url, caplog):
    dcp.save(state(1), storage_writer=TierWriter(url, **OPTIONS))
    store, directory = Address.of(url, OPTIONS).open(write=True)
    later = SaveMark(1 << 62, "b")
    bad = Writer(store, f"{directory}/.pending/b", metadata=later.as_metadata(), level=Level.OBJECT)
    bad.write(b"[" * 100_000)
    bad.commit()
    assert same(loaded(url, state(1)), state(1))
    assert "cannot be published" in caplog.text


def test_dicts_are_copied_as_deepcopy_does(url):
    # An object that occurs twice becomes one copy, and subclasses of dict keep their class.
    inner = {"tensor": noise(3), (1, 2): [noise(2)], "none": None, "twice": (once := {"y": 1}), "again": once}
    live = {"a": inner, "b": [inner, OrderedDict(inner)], "c": {1: noise(4), "n": np.arange(3)}, "d": ({"x": 1},)}
    staged = TierWriter(url, **OPTIONS).stage(live)
    copied = staged["a"]
    assert copied is staged["b"][0]
    assert copied is not inner
    assert copied["twice"] is copied["again"]
    assert copied["twice"] is not once
    assert type(staged["b"][1]) is OrderedDict
    assert staged["b"][1]["twice"] is copied["twice"]
    assert staged["b"][1]["tensor"] is copied["tensor"]
    assert copied["none"] is None
    assert [type(key) for key in copied] == [str, tuple, str, str, str]
    assert same(copied["tensor"], inner["tensor"])
    assert same(staged["c"][1], live["c"][1])
    live["c"]["n"][:] = 7
    live["d"][0]["x"] = 2
    assert (list(staged["c"]["n"]), staged["d"]) == ([0, 1, 2], ({"x": 1},))


class Made(Mapping):
    """Makes its values anew on each access."""

    def __getitem__(self, key):
        return {"name": key} if key.startswith("opt") else 7

    def __iter__(self):
        return iter(["opt0", "lr", "step", "opt1", "opt2", "a", "b", "opt3"])

    def __len__(self):
        return 8


def test_dicts_that_are_made_when_they_are_asked_for_are_not_mistaken_for_each_other(url):
    staged = TierWriter(url, **OPTIONS).stage(Made())
    assert dict(staged) == dict(Made())


def saved_in_files(url):
    """Return the number of bytes of each tensor in the shard files of a checkpoint."""
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    found = {}
    for name in fs.glob(f"{path}/*.safetensors"):
        data = fs.cat(name)
        table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        for key, entry in table.items():
            if key != "__metadata__":
                found[key] = found.get(key, 0) + entry["data_offsets"][1] - entry["data_offsets"][0]
    return found


class Some(DefaultSavePlanner):
    """Saves every other tensor, as if other ranks saved the rest."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        return replace(plan, items=plan.items[::2])


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_shard_file_has_only_its_ranks_tensors(url, how):
    live = {f"layer{n:03d}.weight": noise(100, 70 + n, seed=n) for n in range(100)}
    live |= {"y": noise(2000, 599), "z": noise(2000, 600)}
    kept = dict(list(live.items())[::2])
    writer = TierWriter(url, **OPTIONS)
    if how == "save":
        dcp.save(live, storage_writer=writer, planner=Some())
    else:
        dcp.async_save(live, storage_writer=writer, planner=Some()).result()
    assert saved_in_files(url) == {name: tensor.nbytes for name, tensor in kept.items()}
    assert same(loaded(url, kept), kept)


def test_replicas_stay_in_the_file_where_there_is_no_room_to_leave_them_out(url, monkeypatch):
    live = {f"layer{n:03d}.weight": noise(100, 70 + n, seed=n) for n in range(10)}
    kept = dict(list(live.items())[::2])
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage(live)
    begin = ShardFile.begin_runs

    def full(self, lengths, *, wait=True):
        if not wait:
            raise CapacityError("no room")
        return begin(self, lengths, wait=wait)

    monkeypatch.setattr(ShardFile, "begin_runs", full)
    dcp.save(staged, storage_writer=writer, planner=Some())
    assert writer.status()["counters"]["process_kept_replicas"] == 1
    assert saved_in_files(url).keys() == live.keys()
    assert same(loaded(url, kept), kept)


def test_an_old_staged_state_is_not_taken_for_new_memory(url, tmp_path):
    writer = TierWriter(url, ram="64MiB", nvme="0", state_dir=str(tmp_path / "small"))
    kept = []
    for number in range(7):  # more than fit side by side
        kept.append(writer.stage({"a": torch.full((3 << 20,), float(number))}))
        dcp.save(kept[-1], storage_writer=writer, checkpoint_id=f"{url}/{number}")
        writer.wait("object")
        found = loaded(f"{url}/{number}", {"a": torch.empty(3 << 20)})
        assert bool((found["a"] == number).all())
    for staged in kept:
        with pytest.raises(dcp.api.CheckpointException, match="stage it again"):
            dcp.save(staged, storage_writer=writer, checkpoint_id=f"{url}/again")


def test_an_old_save_is_not_taken_for_new_memory_elsewhere(url, tmp_path):
    tierfs.init(f"file://{tmp_path}/other")
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage(state(1))
    dcp.save(staged, storage_writer=writer)
    other = TierWriter(f"tierfs::file://{tmp_path}/other/run", **OPTIONS)
    with pytest.raises(dcp.api.CheckpointException, match="stage it again"):
        dcp.save(staged, storage_writer=other)
    dcp.save(state(1), storage_writer=other)
    assert same(loaded(other.checkpoint_id, state(1)), state(1))


def test_staged_tensors_are_on_the_cpu_for_any_default_device(url):
    live = {"a": torch.arange(6.0), "empty": torch.empty(0, 3)}
    with torch.device("meta"):
        dcp.async_save(live, storage_writer=TierWriter(url, **OPTIONS)).result()
    assert same(loaded(url, live), live)


def test_a_staged_state_goes_to_another_process_by_one_descriptor(url):
    sent = state(1) | {f"layer{number}": noise(20, 20, seed=number) for number in range(200)}
    sent["tied"] = sent["layer7"]
    staged = TierWriter(url, **OPTIONS).stage(sent)
    before = descriptors()
    data = ForkingPickler.dumps(staged)
    # One for the memory, one in flight, and those that torch and the sharing of descriptors keep open permanently.
    assert len(descriptors() - before) <= 8
    received = pickle.loads(data)
    assert type(received) is dict
    assert same(received, sent)
    dcp.save(received, storage_writer=TierWriter(url, **OPTIONS))
    assert same(loaded(url, sent), sent)
    del received, data
    resource_sharer.stop()


def test_a_writer_tells_of_the_save_that_was_asked_for_last(url):
    writer = TierWriter(url, **OPTIONS)
    dcp.save(state(1), storage_writer=writer, checkpoint_id=f"{url}/1")
    dcp.async_save(state(2), storage_writer=writer, checkpoint_id=f"{url}/2").result()
    assert writer.checkpoint_id == f"{url}/2"
    writer.wait("object")
    assert TierWriter(f"{url}/2", **OPTIONS).ack() == "object"
    dcp.save(state(3), storage_writer=pickle.loads(pickle.dumps(writer)))
    assert same(loaded(f"{url}/2", state(3)), state(3))
    dcp.save(state(4), storage_writer=writer)
    assert same(loaded(f"{url}/2", state(4)), state(4))
    assert same(loaded(f"{url}/1", state(1)), state(1))


class Distracted(DefaultSavePlanner):
    """While this planner finishes its plan, another thread saves with the same writer."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def finish_plan(self, plan):
        thread = threading.Thread(target=self.other)
        thread.start()
        thread.join()
        return super().finish_plan(plan)


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_save_without_an_id_stays_where_it_began(url, how):
    writer = TierWriter(url, **OPTIONS)
    planner = Distracted(lambda: dcp.save(state(2), storage_writer=writer, checkpoint_id=f"{url}/2"))
    future = getattr(dcp, how)(state(1), storage_writer=writer, planner=planner)
    if how == "async_save":
        future.result()
    assert same(loaded(url, state(1)), state(1))
    assert same(loaded(f"{url}/2", state(2)), state(2))


def test_a_view_of_much_memory_is_staged_alone(url, tmp_path):
    options = {"ram": "64MiB", "nvme": "0", "state_dir": str(tmp_path / "state")}
    much = torch.zeros(200 << 20, dtype=torch.uint8)
    much[5:9] = 7
    saved = {"view": much[5:9], "aliases": [much[6:8], much[:20:5]]}
    writer = TierWriter(url, **options)
    staged = writer.stage(saved)
    assert {tensor.untyped_storage().nbytes() for tensor in (staged["view"], *staged["aliases"])} == {4, 2}
    dcp.save(staged, storage_writer=writer)
    writer.wait("object")
    assert same(loaded(url, saved), saved)


class Holder:
    """An object that holds a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_an_object_is_saved_with_its_tensors_and_not_with_those_that_were_staged_beside_them(url):
    shared = noise(10)
    live = {"shared": shared, "others": noise(1000), "pair": (noise(2), noise(3)), "holder": Holder(shared)}
    staged = TierWriter(url, **OPTIONS).stage(live)
    assert same(staged["holder"].tensor, shared)
    for name in ("holder", "pair"):
        saved = io.BytesIO()
        torch.save(staged[name], saved)
        assert len(saved.getvalue()) < 2000, name


class Named(torch.Tensor):
    """A subclass that adds nothing to a tensor."""


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_tensors_of_a_plain_subclass_and_names_of_the_format_are_saved(url, how):
    saved = {
        "__metadata__": noise(5),
        "mine": noise(7, 3).as_subclass(Named),
        "turned": noise(4, 3).as_subclass(Named).t(),
    }
    save = getattr(dcp, how)
    future = save(saved, storage_writer=TierWriter(url, **OPTIONS))
    if how == "async_save":
        future.result()
    assert same(loaded(url, saved), {name: tensor.as_subclass(torch.Tensor) for name, tensor in saved.items()})
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    (file,) = fs.glob(f"{path}/*.safetensors")
    assert bits(load_safetensors(fs.cat(file))["__metadata__#1"]) == bits(saved["__metadata__"])


def freed():
    tensor = noise(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(4)


UNUSUAL = {
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "meta device": lambda: torch.empty(4, device="meta"),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "memory was freed": freed,
    "FakeTensor": fake,
}
# torch's planner fails for these, on every rank, without naming the tensor.
UNPLANNED = {
    "_mkldnn": lambda: torch.randn(4, 4).to_mkldnn(),
    "nested: store": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested: store.*unbind": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "not initialized": torch.nn.UninitializedParameter,
    "not initialized: call": torch.nn.UninitializedBuffer,
}
without_warnings = pytest.mark.filterwarnings(
    *(
        f"ignore:{text}:UserWarning"
        for text in (".*quant.*", "Sparse CSR", "TypedStorage", ".*nested tensors", ".*FakeTensor")
    )
)


@without_warnings
@pytest.mark.parametrize(
    ("what", "how"),
    [(what, how) for what in UNUSUAL for how in ("save", "async_save")] + [(what, "async_save") for what in UNPLANNED],
)
def test_a_tensor_that_is_more_than_its_elements_is_refused_by_name(url, what, how):
    saved = {"model": {"good": noise(5), "bad": {**UNUSUAL, **UNPLANNED}[what]()}}
    # The error must not come from staging: the other ranks would not learn of it.
    with pytest.raises(dcp.api.CheckpointException, match=rf"'model.bad', a tensor.*{what}"):
        getattr(dcp, how)(saved, storage_writer=TierWriter(url, **OPTIONS)).result()
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    assert not fs.exists(path)


def test_another_layout_is_refused_with_the_way_to_export(url):
    with pytest.raises(InvalidInputError, match="tierfs checkpoint export"):
        TierWriter(url, layout="dcp", **OPTIONS)


class Headstrong(DefaultSavePlanner):
    """Plans an item of its own without asking the tensor."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.bad = state_dict["bad"]
        super().set_up_planner({"good": state_dict["good"]}, storage_meta, is_coordinator)

    def create_local_plan(self):
        plan = super().create_local_plan()
        return replace(plan, items=plan.items + _create_write_items("bad", torch.empty(0)))

    def resolve_data(self, item):
        return self.bad.detach() if item.index.fqn == "bad" else super().resolve_data(item)


@without_warnings
def test_a_tensor_without_a_copy_is_not_saved_whatever_a_planner_makes_of_it(url):
    sparse = torch.eye(4).to_sparse_csr()
    with pytest.raises(dcp.api.CheckpointException, match=r"'bad'.* cannot be copied"):
        writer = TierWriter(url, **OPTIONS)
        dcp.async_save({"good": noise(5), "bad": sparse}, storage_writer=writer, planner=Headstrong()).result()
    with pytest.raises(dcp.api.CheckpointException, match=r"'pair\.0', a tensor.*sparse_csr"):
        dcp.async_save({"pair": (sparse, 1)}, storage_writer=TierWriter(url, **OPTIONS)).result()


@without_warnings
def test_a_tensor_without_a_copy_is_refused_by_the_process_that_saves(url):
    staged = TierWriter(url, **OPTIONS).stage({"bad": torch.eye(4).to_sparse_csr()})
    received = pickle.loads(ForkingPickler.dumps(staged))
    with pytest.raises(dcp.api.CheckpointException, match=r"'bad', a tensor.*sparse_csr"):
        dcp.save(received, storage_writer=TierWriter(url, **OPTIONS))
    del received
    resource_sharer.stop()


@without_warnings
def test_a_planner_may_make_of_an_unusual_tensor_what_can_be_stored(url):
    class Dense(DefaultSavePlanner):
        def transform_object(self, item, value):
            return value.to_dense()

    live = torch.eye(4).to_sparse()
    future = dcp.async_save({"a": live}, storage_writer=TierWriter(url, **OPTIONS), planner=Dense())
    live.zero_()
    future.result()
    assert same(loaded(url, {"a": torch.zeros(4, 4)}), {"a": torch.eye(4)})


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({"a": torch.ones([1] * 65)}, "'a' has 65 dimensions, but a checkpoint allows at most 64"),
        ({"a\udcff": torch.ones(1)}, r"'a\\udcff': .* valid Unicode"),
        ({"a": functools.reduce(lambda inner, _: {"b": inner}, range(256), 5)}, "257 levels deep .* at most 256"),
    ],
    ids=["dimensions", "name", "depth"],
)
def test_values_without_metadata_are_refused_by_name(url, saved, named):
    with pytest.raises(dcp.api.CheckpointException, match=named):
        dcp.save(saved, storage_writer=TierWriter(url, **OPTIONS))


def test_an_object_that_cannot_be_copied_is_refused_by_name(url):
    with pytest.raises(InvalidInputError, match=r"'lock' contains an object that cannot be copied: .*pickle"):
        dcp.async_save({"a": noise(3), "lock": threading.Lock()}, storage_writer=TierWriter(url, **OPTIONS))


def test_a_shard_file_is_a_safetensors_file(url, tmp_path):
    saved = state(1)["model"]
    dcp.save(saved, storage_writer=TierWriter(url, **OPTIONS))
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    (name,) = [name for name in fs.ls(path, detail=False) if name.endswith(".safetensors")]
    fs.get(name, str(tmp_path / "copy.safetensors"))
    tensors = load_safetensors((tmp_path / "copy.safetensors").read_bytes())
    assert bits(tensors["embedding"]) == bits(saved["embedding"])
    assert bits(tensors["layers.1.weight"]) == bits(saved["layers"][1]["weight"])
    with safe_open(tmp_path / "copy.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors) >= {"transposed", "view", "conjugate", "nothing", "scalar"}
        assert file.get_slice("embedding")[5:6].shape == (1, 500)


def test_a_checkpoint_is_not_replaced_against_the_users_will(url):
    dcp.save(state(1), storage_writer=TierWriter(url, overwrite=False, **OPTIONS))
    with pytest.raises(dcp.api.CheckpointException, match=r"Checkpoint already exists.*holds a checkpoint"):
        dcp.save(state(2), storage_writer=TierWriter(url, overwrite=False, **OPTIONS))
    assert same(loaded(url, state(1)), state(1))


def test_a_writer_that_was_copied_hears_of_no_other_ones_save(url):
    first, second = TierWriter(f"{url}/1", **OPTIONS), TierWriter(f"{url}/2", **OPTIONS)
    metadata = [dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True) for writer in (first, second)]
    for duplicate in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        duplicate(first)
        assert duplicate(metadata[1]).storage_meta == metadata[1].storage_meta
        assert (first.checkpoint_id, first.save_id) == (f"{url}/1", metadata[0].storage_meta.save_id)


def test_a_save_that_nobody_waits_for_is_finished_when_the_program_ends(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    url = f"tierfs::file://{tmp_path}/store/run"
    script = f"""
import torch
import torch.distributed.checkpoint as dcp
from tierfs.dcp import TierWriter

writer = TierWriter({url!r}, ack="staged", ram="256MiB", nvme="0")
dcp.async_save({{"a": torch.arange(2_000_000)}}, storage_writer=writer, no_dist=True)
"""
    (tmp_path / "program.py").write_text(script)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # On a slow machine, stderr may say that files are not in the object tier yet.
    lines = [line for line in done.stderr.splitlines() if "files are not in" not in line]
    assert (done.returncode, lines) == (0, [])
    assert same(loaded(url, {"a": torch.zeros(2_000_000, dtype=torch.int64)}), {"a": torch.arange(2_000_000)})


def test_a_save_that_fails_leaves_nothing_in_memory(url, caplog):
    class Unpicklable:
        def __reduce__(self):
            raise RuntimeError("not this one")

        def __deepcopy__(self, memo):
            return self

    writer = TierWriter(url, **OPTIONS)
    with pytest.raises(dcp.api.CheckpointException, match="not this one"):
        dcp.async_save({"a": noise(2000, 1000), "b": Unpicklable()}, storage_writer=writer).result()
    assert "objects (Unpicklable) are copied with copy.deepcopy" in caplog.text
    gc.collect()
    until(lambda: slot_states(url) <= {SlotState.CLEAN})
    dcp.save({"a": noise(10)}, storage_writer=writer)


def test_levels_are_reached_and_reported(url, tmp_path):
    options = {"ram": "128MiB", "nvme": "64MiB", "state_dir": str(tmp_path / "state")}
    writer = TierWriter(url, ack="local", **options)
    dcp.save(state(1), storage_writer=writer)
    assert writer.ack() in {"local", "object"}
    writer.wait("object")
    assert writer.ack() == "object"
    assert writer.status()["queue_files"] == 0


def test_arguments_of_stock_writers_are_accepted(url):
    writer = TierWriter(
        path=url,
        single_file_per_rank=True,
        sync_files=False,
        thread_count=4,
        per_thread_copy_ahead=1,
        cache_staged_state_dict=True,
        overwrite=True,
        serialization_format=SerializationFormat.SAFETENSORS,
        **OPTIONS,
    )
    dcp.save(state(1), storage_writer=writer)
    assert same(loaded(url, state(1)), state(1))
    with pytest.raises(InvalidInputError, match="_extensions"):
        TierWriter(url, _extensions=[object()])
    with pytest.raises(InvalidInputError, match="unknown option 'colour'"):
        TierWriter(url, colour="red")
    with pytest.raises(InvalidInputError, match="names no store"):
        TierWriter("tierfs::simplecache::memory://x")


def test_a_writer_is_pickled_by_its_configuration(url):
    writer = TierWriter(url, ack="object", **OPTIONS)
    writer.stage(state(1))
    data = pickle.dumps(writer)
    assert len(data) < 2000
    dcp.save(state(1), storage_writer=pickle.loads(data))
    assert same(loaded(url, state(1)), state(1))
    careful = pickle.loads(pickle.dumps(TierWriter(url, overwrite=False, **OPTIONS)))
    with pytest.raises(dcp.api.CheckpointException, match=r"Checkpoint already exists.*holds a checkpoint"):
        dcp.save(state(2), storage_writer=careful)


def test_without_collectives_each_rank_has_metadata_of_its_own(url):
    writer = TierWriter(url, **OPTIONS)
    dcp.async_save(state(1), storage_writer=writer, use_collectives=False).result()
    writer.wait("object")
    assert writer.ack() == "object"
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    assert fs.exists(f"{path}/__0.metadata")
    assert not fs.exists(f"{path}/.metadata")


def test_ranks_that_save_on_their_own_do_not_save_where_they_saved_together(url):
    writer = TierWriter(url, **OPTIONS)
    dcp.save(state(1), storage_writer=writer)
    with pytest.raises(AlreadyExistsError, match=r"another directory, or remove \.metadata"):
        dcp.save(state(2), storage_writer=writer, use_collectives=False)
    assert same(loaded(url, state(1)), state(1))
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    fs.rm_file(f"{path}/.metadata")
    dcp.save(state(2), storage_writer=writer, use_collectives=False)
    assert same(loaded(url, state(2)), state(2))


def test_the_metadata_has_torch_s_version(url):
    returned = dcp.save({"a": noise(3)}, storage_writer=TierWriter(url, **OPTIONS))
    found = TierReader(url, **OPTIONS).read_metadata()
    assert found.version == returned.version == CURRENT_DCP_VERSION


def test_objects_of_any_kind_come_back(url):
    saved = {"text": "x" * 100_000, "bytes": io.BytesIO(b"123"), "set": {1, 2}, "none": None}
    dcp.save(saved, storage_writer=TierWriter(url, **OPTIONS))
    found = dict.fromkeys(saved)
    found["bytes"] = io.BytesIO()
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS), planner=Trusting())
    assert found["text"] == saved["text"]
    assert found["set"] == {1, 2}


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_state_larger_than_the_ram_tier_is_staged_on_the_disk(url, tmp_path, how, caplog):
    options = {"ram": "32MiB", "nvme": "256MiB", "state_dir": str(tmp_path / "small")}
    writer = TierWriter(url, ack="local", **options)
    saved = {f"layer{number}": noise(5 << 19, seed=number) for number in range(5)} | {"step": 7, "t": noise(30, 20).t()}
    live = copy.deepcopy(saved)
    if how == "save":
        dcp.save(live, storage_writer=writer)
    else:
        future = dcp.async_save(live, storage_writer=writer)
        live["layer3"].zero_()
        future.result()
    assert "is staged on the disk of the state directory" in caplog.text
    found = empty_like(saved)
    dcp.load(found, storage_reader=TierReader(url, **options))
    assert same(found, saved)
    writer.wait("object")
    fs, path = fsspec.url_to_fs(url, **options)
    until(lambda: not any((tmp_path / "small/overflow").iterdir()))
    (shard,) = fs.glob(f"{path}/*.safetensors")
    plain = load_safetensors(fs.cat_file(shard))
    assert all(bits(plain[name]) == bits(saved[name]) for name in saved if name != "step")


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_copy_that_fails_fails_the_save_and_nothing_else(url, monkeypatch, how):
    def fail(*_piece):
        raise MemoryError("where this was to be copied to is gone")

    def saves(value):
        if how == "save":
            dcp.save(value, storage_writer=writer)
        else:
            dcp.async_save(value, storage_writer=writer).result()

    writer = TierWriter(url, **OPTIONS)
    first, second = ({"a": noise(LARGE_BYTES, seed=seed), "b": noise(3, seed=seed)} for seed in range(2))
    saves(first)
    with monkeypatch.context() as broken:
        broken.setattr(copying, "copy_piece", fail)
        with pytest.raises((MemoryError, dcp.api.CheckpointException), match="to be copied to is gone"):
            saves(second)
    assert same(loaded(url, empty_like(first)), first)
    saves(second)
    assert same(loaded(url, empty_like(second)), second)


def test_options_outlive_a_reset(url, tmp_path):
    writer = TierWriter(f"{url}/1", ack="object", ram="64MiB", nvme="0", state_dir=str(tmp_path / "aside"))
    for number in (1, 2):
        writer.reset(f"{url}/{number}")
        dcp.save({"a": noise(3, seed=number)}, storage_writer=writer)
    for number in (1, 2):
        assert same(loaded(f"{url}/{number}", {"a": torch.zeros(3)}), {"a": noise(3, seed=number)})
    assert (tmp_path / "aside").is_dir()
    assert writer.ack() == "object"


def seen(state):
    """Return the state with some tensors reshaped, viewed as another dtype, cut to a part, or saved both ways."""
    return state | {
        "flat": state["flat"].reshape(-1),
        "bits": state["bits"].view(torch.int32),
        "part": state["part"].view(torch.int32)[:10],
        "both.flat": state["both"].reshape(-1),
    }


class Seen(DefaultSavePlanner):
    """Saves the staged state as `seen` shows it."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(seen(state_dict), storage_meta, is_coordinator)


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_planners_view_of_a_tensor_is_recorded(url, how):
    live = {name: noise(30, 20, seed=n) for n, name in enumerate(("as it was", "flat", "bits", "part", "both"))}
    expected = seen(live)
    writer = TierWriter(url, **OPTIONS)
    if how == "save":
        dcp.save(live, storage_writer=writer, planner=Seen())
    else:
        dcp.async_save(live, storage_writer=writer, planner=Seen()).result()
    assert same(loaded(url, expected), expected)
    assert not verify_checkpoint(open_checkpoint(*Address.of(url, OPTIONS).open())).damage
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    (name,) = fs.glob(f"{path}/*.safetensors")
    found = load_safetensors(fs.cat(name))
    assert all(same(found[name], expected[name]) for name in ("as it was", "flat", "bits"))


def test_memory_of_the_first_saves_is_made_before_them(url):
    writer = TierWriter(url, **OPTIONS)
    state = {"weight": torch.randn(2 * MIB)}
    writer.prepare(state)
    until(lambda: writer.status()["tiers"]["ram"]["store_bytes"] > 16 * MIB)
    before = until(lambda: writer.status()["tiers"]["ram"]["segments"])
    staged = [writer.stage(state), writer.stage(state)]
    assert writer.status()["tiers"]["ram"]["segments"] == before
    del staged


def test_sizes_are_those_of_what_an_optimizer_makes_in_its_first_step():
    kinds = {
        torch.optim.AdamW: {},
        torch.optim.Adam: {"amsgrad": True},
        torch.optim.SGD: {"lr": 0.1},
        torch.optim.Adagrad: {},
    }
    for kind, options in [*kinds.items(), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})]:
        model = torch.nn.Linear(300, 500)
        model.bias.requires_grad = False
        state = {"model": model, "optimizers": [kind(model.parameters(), **options)]}
        size, longest = sizes_of(state)
        model(torch.ones(300)).sum().backward()
        state["optimizers"][0].step()
        assert abs(sizes_of(state)[0] - size) <= 8, kind  # Adam counts its steps
        assert longest == model.weight.nbytes


def test_sizes_are_those_of_this_rank_and_count_a_tensor_once():
    tensor = torch.zeros(1000)

    class Holder:
        def __init__(self):
            self.parts, self.data = [torch.nn.Linear(10, 10, bias=False)], torch.zeros(77)

        def load_state_dict(self, state):
            raise AssertionError(state)

    assert sizes_of({"a": tensor, "b": [tensor, (tensor,)], "c": Holder(), "d": "text"}) == (4400, 4000)
    assert sizes_of({}) == (0, 0)
