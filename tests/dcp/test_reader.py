"""`TierReader`: the values it loads, how much it reads for them, and its errors when bytes are wrong."""

import itertools
import os
import pathlib
import pickle
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.handmade import BoxPlanner, Handmade, pickled
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierfs
from tierfs.buffers import buffers
from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.load import items
from tierfs.dcp.load.shards import ShardFiles
from tierfs.dcp.tensorbytes import DTYPES, bytes_of, tensor_in
from tierfs.errors import (
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StoreError,
    StoreNotFoundError,
    TierfsError,
)
from tierfs.format import keys
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.store import delete, find, save, stat
from tierfs.testing import flip_bit

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning"),
]
MIB = 1 << 20
FILES = [f"rank-{rank:05d}-0badcafe.safetensors" for rank in range(12)]


def incompressible(*shape):
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)


@pytest.fixture
def made(store):
    return Handmade(store, "run/step_1")


@pytest.fixture
def checkpoint(url):
    return f"tierfs::{url}/run/step_1"


def random(dtype, shape, seed=0):
    length = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (length,), dtype=torch.uint8, generator=torch.manual_seed(seed)
    )
    return tensor_in(bytearray(bytes_of(raw)), dtype, shape)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def read_boxes(checkpoint, wanted, objects=(), **options):
    reader, planner = TierReader(checkpoint, **options), BoxPlanner(wanted)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.plan(metadata, objects), planner).wait()
    return planner


# -- loading ---------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_through_dcp(made, checkpoint):
    state = {"model": {"w": torch.randn(7, 3), "b": torch.randn(3).bfloat16()}, "step": 12, "names": ["a", "b"]}
    made.tensor("model.w", state["model"]["w"], {FILES[0]: [((0, 0), (4, 3))], FILES[1]: [((4, 0), (3, 3))]})
    made.tensor("model.b", state["model"]["b"], FILES[1])
    made.object("step", pickled(12), FILES[0])
    made.object("names", pickled(["a", "b"]), FILES[0])
    made.save()
    loaded = {"model": {"w": torch.zeros(7, 3), "b": torch.zeros(3).bfloat16()}, "step": 0, "names": []}
    dcp.load(loaded, storage_reader=TierReader(checkpoint), planner=TierLoadPlanner())
    assert same(loaded["model"]["w"], state["model"]["w"])
    assert same(loaded["model"]["b"], state["model"]["b"])
    assert (loaded["step"], loaded["names"]) == (12, ["a", "b"])
    found = _load_state_dict_from_keys({"model.b"}, storage_reader=TierReader(checkpoint))
    assert same(found["model"]["b"], state["model"]["b"])


def test_every_dtype_comes_back_in_order_and_transposed(made, checkpoint):
    names = sorted(name for name in DTYPES if not name.startswith(("qint", "quint")))
    saved = {name: random(DTYPES[name], (5, 3), seed) for seed, name in enumerate(names)}
    for name, tensor in saved.items():
        made.tensor(name, tensor, FILES[len(name) % 2])
    made.save()
    straight = {(name, (0, 0)): random(tensor.dtype, (5, 3), 99) for name, tensor in saved.items()}
    read_boxes(checkpoint, straight)
    assert [name for name, tensor in saved.items() if not same(straight[name, (0, 0)], tensor)] == []
    turned = {
        (name, (0, 0)): torch.zeros(3 * 5 * tensor.dtype.itemsize, dtype=torch.uint8).view(tensor.dtype).view(3, 5).t()
        for name, tensor in saved.items()
    }
    read_boxes(checkpoint, turned)
    assert [name for name, tensor in saved.items() if not same(turned[name, (0, 0)], tensor)] == []


def test_scalars_and_empty_tensors_come_back(made, checkpoint):
    made.tensor("scalar", torch.tensor(3.5), FILES[0])
    made.tensor("empty", torch.empty(0, 4), FILES[0])
    made.object("nothing", b"", FILES[0])
    made.save()
    loaded = {"scalar": torch.tensor(0.0), "empty": torch.empty(0, 4)}
    dcp.load(loaded, storage_reader=TierReader(checkpoint), planner=TierLoadPlanner())
    assert loaded["scalar"].item() == 3.5
    wanted = {("scalar", ()): torch.tensor(0.0)}
    assert read_boxes(checkpoint, wanted, ["nothing"]).objects == {"nothing": b""}


@pytest.mark.parametrize("rows", [100, 5000], ids=["small", "large"])
def test_a_destination_of_other_dtype_or_strides_is_filled(made, checkpoint, rows):
    tensor = torch.randn(rows, 1000)
    made.tensor("w", tensor, FILES[0])
    made.save()
    for target in (
        torch.zeros(rows, 1000, dtype=torch.float64),
        torch.zeros(rows, 1000, dtype=torch.bfloat16),
        torch.zeros(1000, rows).t(),
        torch.zeros(rows, 2000)[:, ::2],
        torch.nn.Parameter(torch.zeros(rows, 1000)),
    ):
        read_boxes(checkpoint, {("w", (0, 0)): target})
        assert torch.equal(target, tensor.to(target.dtype))


def test_autograd_hears_of_what_was_read_straight_into_memory(made, checkpoint):
    made.tensor("w", torch.ones(10), FILES[0])
    made.save()
    target = torch.zeros(10)
    before = target._version
    read_boxes(checkpoint, {("w", (0,)): target})
    assert target._version > before


def test_objects_are_handed_to_the_planner_as_they_were_stored(made, checkpoint):
    made.object("a", b"12345", FILES[0])
    made.object("b", b"x" * (5 * MIB), FILES[1])
    made.save()
    assert read_boxes(checkpoint, {}, ["a", "b"]).objects == {"a": b"12345", "b": b"x" * (5 * MIB)}


def test_planner_calls_stay_on_the_calling_thread(made, checkpoint):
    made.tensor(
        "w", torch.randn(3000, 1000), {FILES[0]: [((0, 0), (1500, 1000))], FILES[1]: [((1500, 0), (1500, 1000))]}
    )
    made.save()
    threads = set()

    class Watched(BoxPlanner):
        def resolve_tensor(self, item):
            threads.add(threading.get_ident())
            return super().resolve_tensor(item)

        def commit_tensor(self, item, tensor):
            threads.add(threading.get_ident())
            super().commit_tensor(item, tensor)

    reader, planner = TierReader(checkpoint), Watched({("w", (0, 0)): torch.zeros(3000, 1000)})
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.plan(metadata), planner)
    assert threads == {threading.get_ident()}
    assert planner.committed == ["w", "w"]


def test_many_waves_give_what_one_does(made, checkpoint, monkeypatch):
    monkeypatch.setattr(items, "WAVE_BYTES_MAX", 5000)
    monkeypatch.setattr(items, "BUFFERS_MAX", 2)
    monkeypatch.setattr(items, "CHUNK_BYTES", 2000)
    saved = {f"t{number}": torch.randn(number, 7) for number in range(1, 60)}
    for number, (name, tensor) in enumerate(saved.items()):
        made.tensor(name, tensor, FILES[number % 3])
    made.save()
    dtypes = [torch.float32, torch.float64]  # directly, and through buffers
    wanted = {
        (name, (0, 0)): torch.zeros_like(tensor, dtype=dtypes[number % 2])
        for number, (name, tensor) in enumerate(saved.items())
    }
    planner = read_boxes(checkpoint, wanted)
    assert all(same(wanted[name, (0, 0)].float(), tensor) for name, tensor in saved.items())
    assert sorted(planner.committed) == sorted(saved)


@pytest.mark.parametrize(("slack", "waves"), [(64 << 20, 2), (0, 3)])
def test_a_wave_ends_where_a_chunk_does(store, checkpoint, monkeypatch, slack, waves):
    # If two waves need one chunk, each of them requests it.
    state = {
        f"{number}.w": incompressible(6 << 10, 128) for number in range(16)
    }  # 3 MiB each: 5 fill a chunk except 1 MiB
    dcp.save(state, storage_writer=TierWriter(checkpoint), no_dist=True)
    monkeypatch.setattr(items, "WAVE_BYTES_MAX", 20 << 20)
    monkeypatch.setattr(items, "SLACK_BYTES", slack)
    asked, read = [], ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", lambda self, ranges: read(self, asked.append(ranges) or ranges))
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, storage_reader=TierReader(checkpoint), no_dist=True)
    assert all(same(target[name], tensor) for name, tensor in state.items())
    assert len(asked) == waves


def test_a_wave_of_parts_of_a_tensor_ends_where_a_chunk_does(store, checkpoint, monkeypatch):
    # The end of the tensor does not show where its parts end.
    tensor = incompressible(24, 1 << 18)  # 16 rows in one chunk, 8 in the next
    dcp.save({"w": tensor}, storage_writer=TierWriter(checkpoint), no_dist=True)
    monkeypatch.setattr(items, "WAVE_BYTES_MAX", 6 << 20)
    asked, read = [], ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", lambda self, ranges: read(self, asked.append(ranges) or ranges))
    wanted = {("w", (row, 0)): torch.zeros_like(tensor[row : row + 4]) for row in range(0, 24, 4)}
    read_boxes(checkpoint, wanted)
    assert all(same(found, tensor[row : row + 4]) for (_, (row, _)), found in wanted.items())
    assert [len(ranges) for ranges in asked] == [4, 2]


def test_chunk_ends_are_known_for_every_offset(made, store):
    made.tensor("w", incompressible(100, 10), FILES[0])
    made.save()
    files = ShardFiles(store, "run/step_1", {})
    length = files.reader(FILES[0]).length
    assert [files.is_cut(FILES[0], at) for at in (0, 1, length, length + 1, 1 << 80)] == [
        True,
        False,
        True,
        False,
        False,
    ]


def test_contiguous_destinations_are_read_without_a_buffer(made, checkpoint, monkeypatch):
    tensor = incompressible(5000, 1000)
    made.tensor("w", tensor, {FILES[0]: [((0, 0), (2500, 1000))], FILES[1]: [((2500, 0), (2500, 1000))]})
    made.save()

    def refuse():
        raise AssertionError("a buffer was taken")

    monkeypatch.setattr(buffers(), "take", refuse)
    wanted = {("w", (0, 0)): torch.zeros_like(tensor), ("w", (1000, 0)): torch.zeros_like(tensor[:3000])}
    read_boxes(checkpoint, wanted)
    assert same(wanted["w", (0, 0)], tensor)
    assert same(wanted["w", (1000, 0)], tensor[1000:4000])


@pytest.mark.usefixtures("one_transfer")
def test_one_thread_for_transfers_is_enough(made, checkpoint):
    tensor = torch.randn(15000, 1000)
    made.tensor("w", tensor, dict(zip(FILES, [[box] for box in grid(tensor.shape, 3, 1)], strict=False)))
    made.save()
    for target in (torch.zeros(15000, 1000), torch.zeros(1000, 15000).t()):
        read_boxes(checkpoint, {("w", (0, 0)): target})
        assert torch.equal(target, tensor)


@pytest.mark.parametrize("tiers", [{"ram": "128MiB", "nvme": "0"}, {"ram": "0", "nvme": "0"}], ids=["ram", "none"])
def test_local_tiers_make_no_difference_to_what_comes_back(tmp_path, tiers):
    url = f"file://{tmp_path}/store"
    tierfs.init(url)
    made = Handmade(open_store(replace(parse_url(url), tiers=TierOptions(**tiers)))[0], "run")
    tensor = torch.randn(6000, 1000)
    made.tensor("w", tensor, FILES[0])
    made.tensor("small", tensor[:10], FILES[1])
    made.save()
    wanted = {("w", (0, 0)): torch.zeros(6000, 1000), ("small", (2, 0)): torch.zeros(8, 500).t().t()}
    read_boxes(f"tierfs::{url}/run", wanted, **tiers)
    assert same(wanted["w", (0, 0)], tensor)
    assert same(wanted["small", (2, 0)], tensor[2:10, :500])


# -- resharding ------------------------------------------------------------------------------------------------------


def grid(shape, down, across):
    """Return the boxes of a grid over a matrix. Their sizes differ where the shape does not divide evenly."""
    rows = [shape[0] * part // down for part in range(down + 1)]
    columns = [shape[1] * part // across for part in range(across + 1)]
    return [
        ((top, left), (bottom - top, right - left))
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]


def asked(store):
    return int(store.objects.snapshot()["get"]["bytes"])


@pytest.mark.parametrize("layout", [(1, 1), (2, 3), (3, 4), (7, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_boxes_come_back_under_any_other_layout(made, checkpoint, layout, dtype):
    tensor = torch.randn(101, 67).to(dtype)
    made.tensor("w", tensor, dict(zip(FILES, [[box] for box in grid(tensor.shape, 4, 3)], strict=True)))
    made.save()
    wanted = {("w", offsets): torch.zeros(sizes, dtype=dtype) for offsets, sizes in grid(tensor.shape, *layout)}
    read_boxes(checkpoint, wanted)
    for (_, (top, left)), part in wanted.items():
        assert torch.equal(part, tensor[top : top + part.shape[0], left : left + part.shape[1]])


def test_rows_of_another_layout_cost_what_they_need_and_a_block_each(made, store, checkpoint):
    tensor = incompressible(6000, 4000)
    made.tensor("w", tensor, dict(zip(FILES, [[box] for box in grid(tensor.shape, 4, 1)], strict=False)))
    made.save()
    reader = TierReader(checkpoint)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    for top, bottom in [(0, 750), (1300, 1700), (2900, 4700), (5900, 6000)]:
        planner = BoxPlanner({("w", (top, 0)): torch.zeros_like(tensor[top:bottom])})
        plan = planner.plan(metadata)
        before = asked(store)
        reader.read_data(plan, planner)
        needed = (bottom - top) * 16000
        # The blocks at both ends of a range are read whole, to be verified. Each chunk has an envelope.
        assert needed <= asked(store) - before <= 1.1 * needed + len(plan.items) * 2 * MIB
        assert torch.equal(planner.wanted["w", (top, 0)], tensor[top:bottom])


def test_an_eighth_of_every_tensor_of_a_saved_state_costs_little_more_than_that(url, store, checkpoint):
    state = {f"large{number}": torch.randn(1600 + 8 * number, 2000) for number in range(3)}
    state |= {f"small{number}": torch.randn(64, 30) for number in range(100)}
    dcp.save(state, storage_writer=TierWriter(checkpoint, ack="object"))
    wanted = {}
    for name, tensor in state.items():
        rows = tensor.shape[0] // 8
        wanted[name, (5 * rows, 0)] = torch.zeros(rows, tensor.shape[1])
    before = store.objects.snapshot()["get"]
    read_boxes(checkpoint, wanted)
    after = store.objects.snapshot()["get"]
    for (name, (top, _)), part in wanted.items():
        assert torch.equal(part, state[name][top : top + part.shape[0]])
    needed = sum(part.nbytes for part in wanted.values())
    # One more block at both ends of each large tensor's rows. All small tensors lie in one block.
    assert needed <= after["bytes"] - before["bytes"] <= 1.1 * needed + 7 * MIB
    assert after["requests"] - before["requests"] <= 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["straight", "converted"])
def test_a_chunk_that_tensors_share_is_fetched_once(url, store, checkpoint, dtype):
    state = {f"layer.{number}.weight": torch.randn(300 + number, 1024) for number in range(40)}
    dcp.save(state, storage_writer=TierWriter(checkpoint, ack="object"))
    wanted = {(name, (0, 0)): torch.zeros_like(tensor, dtype=dtype) for name, tensor in state.items()}
    before = store.objects.snapshot()["get"]["requests"]
    read_boxes(checkpoint, wanted)
    chunks = -(-sum(tensor.nbytes for tensor in state.values()) // (16 * MIB))
    # Metadata and header come on top, and a pack ends where the next tensor does not fit.
    assert store.objects.snapshot()["get"]["requests"] - before <= chunks + 4
    assert all(torch.equal(wanted[name, (0, 0)].float(), tensor) for name, tensor in state.items())


@pytest.mark.usefixtures("one_transfer")
def test_sources_of_derived_copies_are_fetched_once(url, monkeypatch, tmp_path):
    # The copies lie before all tensors they are derived from, and those do not fit into the ram tier.
    monkeypatch.setenv("TIERFS_SHM_DIR", str(tmp_path))
    state = {f"master.{number}": torch.randn(2048, 2048, generator=torch.manual_seed(number)) for number in range(8)}
    state |= {f"working.{number}": state[f"master.{number}"].bfloat16() for number in range(8)}
    options = {"ram": "256MiB", "nvme": 0, "state_dir": str(tmp_path / "writer"), "codecs": "all"}
    writer = TierWriter(f"{url}/run/step_1", ack="object", **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    Address.of(url, {**options, "ack": "object"}).open()[0].tiers.close()
    wanted = {(name, (0, 0)): torch.zeros_like(tensor) for name, tensor in state.items()}
    options = {"ram": "64MiB", "nvme": 0, "state_dir": str(tmp_path / "reader")}
    reader, planner = TierReader(f"{url}/run/step_1", **options), BoxPlanner(wanted)
    reader.set_up_storage_reader(metadata := reader.read_metadata(), is_coordinator=True)
    store, directory = Address.of(reader.checkpoint_id, options).open()
    store.tiers.cache.keeps_reads = True  # as for a remote object tier
    (shard,) = [entry for entry in find(store, directory) if entry.path.endswith(".safetensors")]
    assert sum(bool(row.bases) for row in shard.manifest.rows) == 4, "working copies are derived"
    before = store.objects.snapshot()["get"]["requests"]
    reader.read_data(planner.plan(metadata), planner).wait()
    asked = store.objects.snapshot()["get"]["requests"] - before
    store.tiers.close()
    assert all(same(wanted[name, (0, 0)], tensor) for name, tensor in state.items())
    assert asked == len(shard.manifest.rows) - 1, "all but the header"


def test_many_small_tensors_are_read_with_few_requests(made, store, checkpoint):
    saved = {f"layer.{number}": random(torch.bfloat16, (30, 50), number) for number in range(300)}
    for name, tensor in saved.items():
        made.tensor(name, tensor, FILES[0])
    made.save()
    wanted = {(name, (0, 0)): torch.zeros_like(tensor) for name, tensor in sorted(saved.items(), reverse=True)}
    before = store.objects.snapshot()["get"]
    read_boxes(checkpoint, wanted)
    after = store.objects.snapshot()["get"]
    assert after["requests"] - before["requests"] < 6
    assert after["bytes"] - before["bytes"] < 2 * MIB
    assert all(same(wanted[name, (0, 0)], tensor) for name, tensor in saved.items())


def test_a_box_that_is_not_in_the_checkpoint_is_refused(made, checkpoint):
    made.tensor("w", torch.zeros(4, 4), FILES[0])
    made.save()
    reader, planner = TierReader(checkpoint), BoxPlanner({("w", (0, 0)): torch.zeros(4, 4)})
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    plan = planner.plan(metadata)
    planner.resolve_tensor = lambda _: torch.zeros(4, 3)
    with pytest.raises(
        InvalidInputError, match=r"w: the destination has shape \[4, 3\], but the part to load has \[4, 4\]"
    ):
        reader.read_data(plan, planner)
    object.__setattr__(plan.items[0], "storage_offsets", torch.Size((1, 0)))
    with pytest.raises(InvalidInputError, match=r"w: the plan reads \[4, 4\] elements at \[1, 0\]"):
        reader.read_data(plan, planner)


@pytest.mark.parametrize(
    ("destination", "said"),
    [
        (
            lambda: torch.zeros(4, 4).to_sparse(),
            "w: the destination's layout is torch.sparse_coo: load into a dense tensor",
        ),
        (lambda: torch.zeros(1, 4).expand(4, 4), "w: the destination's elements share memory"),
    ],
)
def test_a_destination_that_cannot_take_the_elements_is_named(made, checkpoint, destination, said):
    made.tensor("w", torch.ones(4, 4), FILES[0])
    made.save()
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": destination()}, storage_reader=TierReader(checkpoint), planner=TierLoadPlanner())
    assert said in str(caught.value.failures[0][0])


# -- errors ----------------------------------------------------------------------------------------------------------


def chunk_of(store, path):
    return [keys.chunk_key(row.name) for row in stat(store, path).manifest.rows]


def test_a_flipped_bit_names_tensor_file_and_tier(made, store, checkpoint):
    made.tensor("model.big", random(torch.uint8, (3 * MIB,), 1), FILES[0])
    made.tensor("model.other", random(torch.uint8, (3 * MIB,), 2), FILES[1])
    made.save()
    flip_bit(store.objects, chunk_of(store, f"run/step_1/{FILES[1]}")[1], 8 * MIB)  # behind the header
    wanted = {("model.big", (0,)): torch.zeros(3 * MIB, dtype=torch.uint8)}
    read_boxes(checkpoint, wanted)
    wanted = {("model.other", (0,)): torch.zeros(3 * MIB, dtype=torch.uint8)}
    with pytest.raises(CorruptionError, match=rf"'model\.other' in shard file .*{FILES[1]}, object tier") as caught:
        read_boxes(checkpoint, wanted)
    assert caught.value.tier == "object"
    loaded = {"model": {"other": torch.zeros(3 * MIB, dtype=torch.uint8)}}
    with pytest.raises(CheckpointException, match=r"model\.other"):
        dcp.load(loaded, storage_reader=TierReader(checkpoint))


def test_only_tensors_in_a_damaged_block_are_named(store, checkpoint):
    state = {f"layer.{number}": random(torch.uint8, (2 * MIB,), number) for number in range(6)}
    dcp.save(state, storage_writer=TierWriter(checkpoint, ack="object"))
    (shard,) = [entry.path for entry in find(store, "run/step_1") if entry.path.endswith(".safetensors")]
    flip_bit(store.objects, chunk_of(store, shard)[1], 8 * 9 * MIB)
    with pytest.raises(CorruptionError, match=r"^'layer\.4' in shard file"):
        read_boxes(checkpoint, {(name, (0,)): torch.zeros_like(tensor) for name, tensor in state.items()})


def test_a_shard_file_that_is_missing_or_was_replaced_is_named(made, store, checkpoint):
    made.tensor("a", torch.zeros(3), FILES[0])
    made.save()
    save(store, f"run/step_1/{FILES[0]}", b"short")
    with pytest.raises(CorruptionError, match=f"{FILES[0]} has 5 bytes"):
        read_boxes(checkpoint, {("a", (0,)): torch.zeros(3)})
    delete(store, f"run/step_1/{FILES[0]}")
    with pytest.raises(CorruptionError, match=f"{FILES[0]} is missing"):
        read_boxes(checkpoint, {("a", (0,)): torch.zeros(3)})


def test_an_object_tier_that_fails_is_named_with_what_was_read(made, store, checkpoint, monkeypatch):
    made.tensor("a", random(torch.uint8, (MIB,)), FILES[0])
    made.save()
    reader, planner = TierReader(checkpoint), BoxPlanner({("a", (0,)): torch.zeros(MIB, dtype=torch.uint8)})
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)

    def fail(key, *_args, **_kwargs):
        raise StoreError("no route to host", transient=True)

    monkeypatch.setattr(store.objects, "get", fail)
    with pytest.raises(StoreError, match=r"'a' in shard file .*no route to host") as caught:
        reader.read_data(planner.plan(metadata), planner)
    assert caught.value.transient


def test_a_missing_checkpoint_is_not_found_and_says_what_was_looked_for(store, checkpoint, url):
    with pytest.raises(NotFoundError, match=r"run/step_1/\.metadata does not exist"):
        TierReader(checkpoint).read_metadata()
    with pytest.raises(NotFoundError, match=r"__3\.metadata does not exist"):
        TierReader(checkpoint).read_metadata(rank=3)
    with pytest.raises(StoreNotFoundError, match="tierfs init"):
        TierReader(f"{url}-elsewhere/x").read_metadata()


def test_metadata_that_is_damaged_or_something_else_is_refused(made, store, checkpoint):
    made.tensor("a", torch.zeros(3), FILES[0])
    made.save()
    for content in (b"", b"hello", b"\x80", b"\x80\x04garbage"):
        save(store, "run/step_1/.metadata", content)
        with pytest.raises(CorruptionError, match=r"run/step_1/\.metadata"):
            TierReader(checkpoint).read_metadata()


# -- construction, metadata and plans --------------------------------------------------------------------------------


def test_metadata_of_one_rank_is_read_where_there_is_no_other(made, checkpoint):
    made.tensor("a", torch.arange(3.0), FILES[0])
    made.save("__0.metadata")
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, storage_reader=TierReader(checkpoint))
    assert torch.equal(loaded["a"], torch.arange(3.0))


@pytest.mark.parametrize("damage", ["nothing", "bits", "an outage"])
def test_one_ranks_save_never_hides_a_later_save_of_all(made, store, checkpoint, damage, monkeypatch):
    made.tensor("a", torch.arange(3.0), FILES[0])
    made.save("__0.metadata")
    save(store, "run/step_1/.metadata", b"\x80garbage")
    if damage == "an outage":
        read = store.objects.read

        def fail(key, limit):
            if key == keys.record_key("run/step_1/.metadata"):
                raise StoreError("no route to host", transient=True)
            return read(key, limit)

        monkeypatch.setattr(store.objects, "read", fail)
    elif damage == "nothing":
        delete(store, "run/step_1/.metadata")
    loaded = {"a": torch.zeros(3)}
    if damage == "nothing":
        dcp.load(loaded, storage_reader=TierReader(checkpoint))
        assert torch.equal(loaded["a"], torch.arange(3.0))
        return
    with pytest.raises(TierfsError):
        TierReader(checkpoint).read_metadata(rank=0)
    with pytest.raises(CheckpointException):
        dcp.load(loaded, storage_reader=TierReader(checkpoint))
    assert not loaded["a"].any()


def test_it_takes_every_form_of_a_url_and_a_local_path(tmp_path, monkeypatch):
    tierfs.init(f"file://{tmp_path}/store")
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.mine]\nurl = "file://{tmp_path}/store"\n')
    monkeypatch.setenv("TIERFS_CONFIG", str(config))
    made = Handmade(open_store(parse_url(f"file://{tmp_path}/store"))[0], "run")
    made.tensor("a", torch.arange(3.0), FILES[0])
    made.save()
    base = f"{tmp_path}/store/run"
    for path in (f"tierfs::file://{base}", f"file://{base}", "tierfs://mine/run", base, pathlib.Path(base), f"{base}/"):
        assert TierReader.validate_checkpoint_id(path)
        loaded = {"a": torch.zeros(3)}
        dcp.load(loaded, storage_reader=TierReader(path))
        assert torch.equal(loaded["a"], torch.arange(3.0))
        assert TierReader(path).checkpoint_id == os.fspath(path)


def test_making_one_opens_nothing_and_options_outlive_a_reset(tmp_path):
    reader = TierReader(f"tierfs::file://{tmp_path}/nowhere", ram="0", state_dir=f"{tmp_path}/state", file={})
    tierfs.init(f"file://{tmp_path}/store")
    made = Handmade(open_store(parse_url(f"file://{tmp_path}/store"))[0], "run")
    made.tensor("a", torch.arange(3.0), FILES[0])
    made.save()
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=f"tierfs::file://{tmp_path}/store/run", storage_reader=reader)
    assert torch.equal(loaded["a"], torch.arange(3.0))
    assert reader.checkpoint_id == f"tierfs::file://{tmp_path}/store/run"
    reader.reset()
    assert reader.checkpoint_id.endswith("/store/run")
    assert pickle.loads(pickle.dumps(reader)).checkpoint_id == reader.checkpoint_id


def test_urls_and_options_that_mean_nothing_are_refused():
    for path in ("tierfs::", "tierfs::simplecache::memory://x", "nonsense://x"):
        assert not TierReader.validate_checkpoint_id(path)
        with pytest.raises(InvalidInputError):
            TierReader(path)
    with pytest.raises(InvalidInputError, match="unknown option 'rum'"):
        TierReader("memory://x", rum="1GiB")


def test_plans_for_a_checkpoint_are_those_of_torch(made, checkpoint):
    made.tensor("w", torch.zeros(8, 8), dict(zip(FILES, [[box] for box in grid((8, 8), 2, 2)], strict=False)))
    made.save()
    described = TierReader(checkpoint).read_metadata().state_dict_metadata["w"]
    assert len(create_read_items_for_chunk_list("w", described, described.chunks)) == 4


@pytest.fixture
def rounds(monkeypatch):
    """For each call of `ShardFiles.read`, the memory that the call writes to."""
    found = []
    read = ShardFiles.read

    def watched(self, ranges):
        ranges = list(ranges)
        found.append([torch.frombuffer(part.out, dtype=torch.uint8) for part in ranges if len(part.out)])
        return read(self, ranges)

    monkeypatch.setattr(ShardFiles, "read", watched)
    return found


@pytest.mark.parametrize("turned", [False, True], ids=["straight", "through buffers"])
def test_two_names_for_one_tensor_are_read_one_after_the_other(made, checkpoint, rounds, turned):
    saved = {name: incompressible(3 * MIB // 4, 4) for name in ("head", "tail", "wte")}
    for name, tensor in saved.items():
        made.tensor(name, tensor, FILES[0])
    made.save()
    tied = torch.zeros(4, 3 * MIB // 4, dtype=torch.int32).T if turned else torch.zeros_like(saved["head"])
    apart = torch.zeros_like(tied)
    dcp.load({"head": tied, "tail": apart, "wte": tied}, storage_reader=TierReader(checkpoint), no_dist=True)
    assert torch.equal(tied, saved["head"]) or torch.equal(tied, saved["wte"])
    assert torch.equal(apart, saved["tail"])
    for outs in rounds:
        places = sorted((out.data_ptr(), out.numel()) for out in outs)
        assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(places))


def test_tensors_that_share_nothing_are_read_at_once(made, checkpoint, rounds):
    flat = torch.zeros(40, 100, dtype=torch.int32)
    saved = {f"t{number}": incompressible(10, 100) for number in range(4)}
    for name, tensor in saved.items():
        made.tensor(name, tensor, {FILES[0]: [((0, 0), (5, 100))], FILES[1]: [((5, 0), (5, 100))]})
    made.save()
    wanted = {(name, (0, 0)): flat[10 * number : 10 * number + 10] for number, name in enumerate(saved)}
    read_boxes(checkpoint, wanted)
    assert torch.equal(flat, torch.cat(list(saved.values())))
    assert len(rounds) == 1
