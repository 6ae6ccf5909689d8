"""A load names a tensor that the metadata describes only in part, and leaves the caller's tensors unchanged."""

import json
import math
import pickle
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.handmade import BoxPlanner, Handmade
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from tierfs import digest
from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.load.coverage import gaps_of, mark_absent, problem_of
from tierfs.errors import CorruptionError, InvalidInputError
from tierfs.store import load as read
from tierfs.store import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
FILE = "rank-00000-0badcafe.safetensors"
ROWS = [([at, 0], [2, 6]) for at in range(0, 8, 2)]


@pytest.fixture
def checkpoint(url):
    return f"tierfs::{url}/run/step_1"


def edit(store, change, name=".metadata"):
    """Change a metadata document, and give it a valid checksum."""
    path = f"run/step_1/{name}"
    document = json.loads(read(store, path))
    change(document)
    del document["checksum"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    document["checksum"] = digest.checksum(text).hex()
    save(store, path, json.dumps(document).encode())


def saved(store, tensor, boxes, change=None):
    made = Handmade(store, "run/step_1")
    made.tensor("model.w", tensor, {FILE: boxes})
    made.tensor("other", torch.arange(3.0), FILE)
    made.save()
    if change is not None:
        edit(store, change)


def load(checkpoint, **state):
    dcp.load(state, storage_reader=TierReader(checkpoint), planner=TierLoadPlanner(flatten_state_dict=False))


def refused(checkpoint, state, *words):
    before = {name: value.clone() for name, value in state.items()}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=TierReader(checkpoint), planner=TierLoadPlanner(flatten_state_dict=False))
    (cause, _), *_ = raised.value.failures.values()
    assert isinstance(cause, CorruptionError), cause
    for word in words:
        assert word in str(cause)
    assert all(torch.equal(state[name], before[name]) for name in state)


def without(*numbers):
    def change(document):
        chunks = document["tensors"]["model.w"]["chunks"]
        document["tensors"]["model.w"]["chunks"] = [c for n, c in enumerate(chunks) if n not in numbers]

    return change


@pytest.mark.parametrize("lost", [(1,), (0, 1, 2, 3)])
def test_a_tensor_with_a_gap_is_refused_by_name(store, checkpoint, lost):
    saved(store, torch.arange(48.0).reshape(8, 6), ROWS, without(*lost))
    state = {"model.w": torch.full((8, 6), -1.0), "other": torch.full((3,), -1.0)}
    refused(checkpoint, state, "'model.w'", f"{12 * len(lost)} of its elements")


@pytest.mark.parametrize("lost", [0, 3])
def test_a_gap_between_columns_and_rows_is_refused(store, checkpoint, lost):
    grid = [([0, 0], [3, 2]), ([0, 2], [3, 4]), ([3, 0], [5, 5]), ([3, 5], [5, 1])]
    saved(store, torch.arange(48.0).reshape(8, 6), grid, without(lost))
    refused(checkpoint, {"model.w": torch.zeros(8, 6), "other": torch.zeros(3)}, "'model.w'")


def test_the_quarter_that_is_there_does_not_pass_for_the_whole(store, checkpoint):
    saved(store, torch.arange(1000.0), [([0], [250])])
    refused(checkpoint, {"model.w": torch.full((1000,), -1.0)}, "'model.w'", "750 of its elements are in no shard")


def test_a_scalar_in_no_chunk_is_refused(store, checkpoint):
    saved(store, torch.tensor(3.0), [([], [])], without(0))
    refused(checkpoint, {"model.w": torch.tensor(-1.0)}, "'model.w'", "1 of its elements")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_a_tensor_without_elements_needs_no_chunks(store, checkpoint, shape):
    saved(store, torch.zeros(shape), [([0] * len(shape), shape)], without(0))
    load(checkpoint, **{"model.w": torch.zeros(shape)})


def test_an_empty_chunk_fills_no_gap(store, checkpoint):
    saved(store, torch.arange(8.0), [([0], [0]), ([1], [7])])
    refused(checkpoint, {"model.w": torch.zeros(8)}, "'model.w'", "1 of its elements")


def test_other_tensors_of_the_checkpoint_still_load(store, checkpoint):
    saved(store, torch.arange(48.0).reshape(8, 6), ROWS, without(1))
    state = {"other": torch.zeros(3)}
    load(checkpoint, **state)
    assert torch.equal(state["other"], torch.arange(3.0))


def test_a_part_that_is_there_still_loads(store, checkpoint):
    tensor = torch.arange(48.0).reshape(8, 6)
    saved(store, tensor, ROWS, without(1))
    reader = TierReader(checkpoint)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = BoxPlanner({("model.w", (4, 0)): torch.zeros(4, 6)})
    reader.read_data(reader.prepare_local_plan(planner.plan(metadata)), planner).wait()
    assert torch.equal(planner.wanted["model.w", (4, 0)], tensor[4:])
    for offsets, shape in [((0, 0), (4, 6)), ((3, 2), (3, 2)), ((2, 0), (2, 1))]:
        planner = BoxPlanner({("model.w", offsets): torch.zeros(shape), ("other", (0,)): torch.zeros(3)})
        plan = planner.plan(metadata)
        for refuses in (reader.prepare_local_plan, lambda plan, planner=planner: reader.read_data(plan, planner)):
            with pytest.raises(CorruptionError, match=r"model\.w.*12 of its elements"):
                refuses(plan)
        assert not any(tensor.any() for tensor in planner.wanted.values())


@pytest.mark.parametrize("offsets", [[0, 0], [1, 0], [2, 3]])
def test_overlapping_chunks_are_refused(store, checkpoint, offsets):
    def overlap(document):
        chunks = document["tensors"]["model.w"]["chunks"]
        chunks[3] = {**chunks[3], "offsets": offsets, "shape": [4, 3]}

    saved(store, torch.arange(48.0).reshape(8, 6), ROWS, overlap)
    refused(checkpoint, {"model.w": torch.zeros(8, 6)}, "model.w")


def test_a_gap_as_long_as_an_overlap_is_refused(store, checkpoint):
    saved(store, torch.arange(9.0), [([0], [4]), ([2], [5])])
    refused(checkpoint, {"model.w": torch.zeros(9)}, "'model.w'", "overlap")


def test_chunks_outside_of_the_tensor_are_refused(store, checkpoint):
    def grow(document):
        document["tensors"]["model.w"]["chunks"][1]["offsets"] = [7, 0]

    saved(store, torch.arange(48.0).reshape(8, 6), ROWS, grow)
    with pytest.raises(CheckpointException, match="not inside"):
        load(checkpoint, **{"model.w": torch.zeros(8, 6)})


@pytest.mark.parametrize("shape", [(9, 6), (48,)])
def test_a_destination_of_another_size_is_refused(store, checkpoint, shape):
    saved(store, torch.arange(48.0).reshape(8, 6), ROWS)
    target = torch.full(shape, -1.0)
    with pytest.raises(CheckpointException, match=r"model\.w"):
        load(checkpoint, **{"model.w": target})
    assert torch.equal(target, torch.full(shape, -1.0))


def test_a_tensor_saved_by_one_rank_is_named_so(store, checkpoint):
    made = Handmade(store, "run/step_1")
    made.tensor("model.w", torch.arange(48.0).reshape(8, 6), {FILE: ROWS[:2]})
    made.save("__3.metadata")
    reader = TierReader(checkpoint)
    metadata = reader.read_metadata(rank=3)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    inside = BoxPlanner({("model.w", (0, 0)): torch.zeros(4, 6)})
    reader.read_data(reader.prepare_local_plan(inside.plan(metadata)), inside).wait()
    with pytest.raises(InvalidInputError, match="rank 3 saved only its own part"):
        reader.prepare_local_plan(BoxPlanner({("model.w", (2, 0)): torch.zeros(4, 6)}).plan(metadata))


# -- torch's own metadata ----------------------------------------------------------------------------------------------


def stock(url, tmp_path, change):
    """Save with torch's own writer, then change the pickled metadata."""
    import fsspec

    fs, root = fsspec.url_to_fs(f"tierfs::{url}")
    state = {"w": torch.arange(1000.0), "n": 3}
    dcp.save(state, storage_writer=FsspecWriter(f"tierfs::{url}/run/step_1"))
    path = f"{root}/run/step_1/.metadata"
    metadata = change(pickle.loads(fs.cat_file(path)))
    fs.pipe_file(path, pickle.dumps(metadata))


def _chunks(*boxes):
    def change(metadata):
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        metadata.state_dict_metadata["w"].chunks = chunks
        [place] = [place for index, place in metadata.storage_data.items() if index.fqn == "w"]
        kept = {index: place for index, place in metadata.storage_data.items() if index.fqn != "w"}
        metadata.storage_data = {**kept, **{MetadataIndex("w", chunk.offsets): place for chunk in chunks}}
        return metadata

    return change


def _without_place(name):
    def change(metadata):
        data = {index: place for index, place in metadata.storage_data.items() if index.fqn != name}
        return replace(metadata, storage_data=data)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_chunks(([0], [250])), ["'w'", "750 of its elements"]),
        (_chunks(), ["'w'", "1000 of its elements"]),
        (_chunks(([0], [1000]), ([0], [1000])), ["'w'", "overlap"]),
        (_chunks(([0], [600]), ([500], [500])), ["'w'", "overlap"]),
        (_chunks(([0], [500]), ([600], [400])), ["'w'", "100 of its elements"]),
        (_without_place("w"), ["'w'", "does not say where"]),
        (_without_place("n"), ["'n'", "does not say where"]),
    ],
    ids=["a quarter", "nothing", "twice", "overlap", "middle", "no place", "no object"],
)
def test_torchs_metadata_is_held_to_the_same(store, url, tmp_path, checkpoint, change, words):
    stock(url, tmp_path, change)
    state = {"w": torch.full((1000,), -1.0), "n": 0}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=TierReader(checkpoint), planner=TierLoadPlanner())
    (cause, _), *_ = raised.value.failures.values()
    assert isinstance(cause, CorruptionError)
    assert all(word in str(cause) for word in words), cause
    assert torch.equal(state["w"], torch.full((1000,), -1.0))
    assert state["n"] == 0


# -- boxes -------------------------------------------------------------------------------------------------------------


def test_gaps_are_the_elements_of_no_box():
    draw = random.Random(7)
    for _ in range(300):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(4)))
        taken, boxes = torch.zeros(shape, dtype=torch.int32), []
        for _ in range(draw.randrange(6)):
            offsets = tuple(draw.randrange(size) for size in shape)
            sizes = tuple(draw.randrange(size - at + 1) for at, size in zip(offsets, shape, strict=True))
            part = taken[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            if not part.any():
                part += 1
                boxes.append((offsets, sizes))
        assert (problem_of(boxes, shape) == "") == bool(taken.all())
        for offsets, sizes in gaps_of(boxes, shape):
            taken[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
        assert (taken == 1).all(), (shape, boxes)


def test_gaps_without_end_are_not_counted():
    # Two crossing combs: each tooth of one splits every gap of the other.
    teeth = [((at, 0), (1, 2001)) for at in range(0, 2000, 2)]
    assert len(gaps_of(teeth, (2000, 2001))) == 1000
    dots = [((at, (at * 7919) % 4001, 0), (1, 1, 1)) for at in range(4000)]
    tall = [((0, 0, at), (4001, 4001, 1)) for at in range(1, 4000)]
    assert gaps_of([*dots, *tall], (4001, 4001, 4001)) is None


def test_a_tensor_with_too_many_gaps_is_refused_as_a_whole(monkeypatch):
    monkeypatch.setattr("tierfs.dcp.load.coverage.WORK_MIN", 0)
    monkeypatch.setattr("tierfs.dcp.load.coverage.WORK_PER_BOX", 1)
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(0, 10, 2)]
    item = TensorStorageMetadata(TensorProperties(), torch.Size([10]), chunks)
    places = {MetadataIndex("w", chunk.offsets): BytesPlace("f", 0, 4) for chunk in chunks}
    marked = mark_absent(Metadata({"w": item}, {}, places))
    [only] = marked.state_dict_metadata["w"].chunks
    assert (only.offsets, only.sizes) == (torch.Size([0]), torch.Size([10]))
    assert isinstance(marked.storage_data[MetadataIndex("w", only.offsets)], str)


def test_whole_tensors_are_passed_through():
    # Ten thousand tensors, half of them in one chunk and half in eight.
    items = {"n": BytesStorageMetadata()}
    for number in range(10_000):
        count = 8 if number % 2 else 1
        chunks = [
            ChunkStorageMetadata(torch.Size([64 // count * at, 0]), torch.Size([64 // count, 9])) for at in range(count)
        ]
        items[f"w{number}"] = TensorStorageMetadata(TensorProperties(), torch.Size([64, 9]), chunks)
    metadata = Metadata(items, {}, {})
    assert mark_absent(metadata) is metadata
    assert math.prod(items["w0"].size) == 576


def test_a_plan_for_what_nobody_saved_is_refused_at_once(store, checkpoint):
    saved(store, torch.arange(48.0).reshape(8, 6), ROWS)
    reader = TierReader(checkpoint)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = BoxPlanner({("other", (0,)): torch.zeros(3)}).plan(metadata)
    [item] = plan.items
    lost = replace(item, storage_index=MetadataIndex("other", torch.Size([1])))
    with pytest.raises(CorruptionError, match=r"does not say where 'other' at \[1\] is"):
        reader.prepare_local_plan(LoadPlan([lost]))
