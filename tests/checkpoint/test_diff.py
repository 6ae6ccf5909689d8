"""Which tensors of two checkpoints differ, and by how much, even if their shards differ."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.handmade import Handmade, pickled
from support.odd_states import DTYPES, noise, odd_state

from tierfs.checkpoint.diff import compare, compare_tensors
from tierfs.dcp import TierWriter
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.dcp.load import boxes
from tierfs.dcp.load.boxes import Box, BoxReader, boxes_of, in_batches
from tierfs.dcp.tensorbytes import bytes_of
from tierfs.errors import CorruptionError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning"),
]
FILES = [f"rank-{rank:05d}-0badcafe.safetensors" for rank in range(3)]


def saved(store, directory, **tensors):
    made = Handmade(store, directory)
    for fqn, tensor in tensors.items():
        made.tensor(fqn, tensor, FILES[0])
    made.save()
    return open_checkpoint(store, directory)


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_bit_is_seen_in_every_dtype(dtype):
    one = noise(dtype, (100,), 3)
    raw = bytearray(bytes_of(one))
    raw[17 * dtype.itemsize] ^= 1
    other = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    found = compare_tensors(one, other)
    assert (found.elements, found.differing) == (100, 1)
    assert (found.max_abs is None) == (found.not_finite == 1)
    assert compare_tensors(one, one.clone()).differing == 0


@pytest.mark.parametrize(
    ("dtype", "a", "b", "max_abs"),
    [
        (torch.int64, [-(2**63), 5], [2**63 - 1, 4], 2**64 - 1),
        (torch.uint64, [0, 5], [2**64 - 1, 5], 2**64 - 1),
        (torch.int8, [-100], [100], 200),
        (torch.uint8, [1], [255], 254),
        (torch.bool, [True, False], [False, False], 1),
        (torch.float32, [1.0, 2.0], [1.5, 2.0], 0.5),
        (torch.float64, [0.1], [0.3], 0.3 - 0.1),
        (torch.bfloat16, [1.0, 3.0], [2.0, -3.0], 6.0),
        (torch.float8_e4m3fn, [1.0], [-2.0], 3.0),
        (torch.complex64, [1 + 2j, 3], [4 + 6j, 3], 5.0),
        (torch.complex32, [1 + 2j], [4 + 6j], 5.0),
        (torch.float32, [0.0], [-0.0], 0.0),
    ],
    ids=str,
)
def test_the_largest_difference_is_exact(dtype, a, b, max_abs):
    found = compare_tensors(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))
    assert (found.max_abs, found.not_finite) == (max_abs, 0)
    assert found.differing == sum(str(one) != str(other) for one, other in zip(a, b, strict=True))


def test_a_nan_equals_itself_and_differs_from_all_else_by_no_number():
    nan, inf = math.nan, math.inf
    same = torch.tensor([nan, inf, -inf])
    assert compare_tensors(same, same.clone()).differing == 0
    found = compare_tensors(torch.tensor([nan, inf, 1.0, 2.0]), torch.tensor([nan, -inf, nan, 2.5]))
    assert (found.differing, found.not_finite, found.max_abs) == (3, 2, 0.5)
    assert found.fraction == 0.75
    found = compare_tensors(torch.tensor([1.0]), torch.tensor([inf]))
    assert (found.max_abs, found.not_finite) == (None, 1)


def test_empty_tensors_and_scalars_are_compared():
    assert compare_tensors(torch.empty(0, 3), torch.empty(0, 3)).fraction == 0
    assert compare_tensors(torch.tensor(1.0), torch.tensor(3.0)).max_abs == 2


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_everything_equals_itself_whoever_wrote_it(url, store):
    dcp.save(odd_state(), storage_writer=TierWriter(f"tierfs::{url}/run/1", ack="object"), no_dist=True)
    dcp.save(odd_state(), checkpoint_id=f"tierfs::{url}/run/2", no_dist=True)
    one, other = open_checkpoint(store, "run/1"), open_checkpoint(store, "run/2")
    seen = []
    found = compare(one, other, progress=seen.append)
    assert found.is_none
    assert found.equal == len(one.tensors) + len(one.objects)
    assert sum(seen) == one.length - sum(place.length for place in one.objects.values())


def test_unmatched_values_are_listed(store):
    made = Handmade(store, "b")
    made.tensor("kept", torch.ones(3), FILES[0])
    made.tensor("cast", torch.ones(3).half(), FILES[0])
    made.tensor("grown", torch.ones(4), FILES[0])
    made.tensor("new", torch.ones(1), FILES[0])
    made.object("turned", pickled(1), FILES[0])
    made.object("note", pickled("b"), FILES[0])
    made.save()
    a = Handmade(store, "a")
    for fqn in ("kept", "cast", "grown", "turned", "old"):
        a.tensor(fqn, torch.ones(3), FILES[0])
    a.object("note", pickled("a"), FILES[0])
    a.save()
    found = compare(open_checkpoint(store, "a"), open_checkpoint(store, "b"))
    assert (found.only_a, found.only_b, found.equal) == (["old"], ["new"], 1)
    assert found.unlike == {
        "cast": ("float32 [3]", "float16 [3]"),
        "grown": ("float32 [3]", "float32 [4]"),
        "turned": ("float32 [3]", "object"),
    }
    assert found.objects == ["note"]
    assert not found.is_none


@pytest.mark.parametrize("bytes_max", [1, 7, 100, 1 << 20])
def test_other_shards_and_small_pieces_change_nothing(store, monkeypatch, bytes_max):
    monkeypatch.setattr(boxes.boxes_of, "__kwdefaults__", {"bytes_max": bytes_max})
    monkeypatch.setattr(boxes.in_batches, "__kwdefaults__", {"bytes_max": bytes_max})
    tensor = noise(torch.int32, (6, 5, 2))
    changed = tensor.clone()
    changed[4, 3, 1] += 3
    made = Handmade(store, "a")
    made.tensor("w", tensor, {FILES[0]: [((0, 0, 0), (6, 2, 2))], FILES[1]: [((0, 2, 0), (6, 3, 2))]})
    made.save()
    made = Handmade(store, "b")
    made.tensor("w", changed, {FILES[2]: [((0, 0, 0), (5, 5, 2)), ((5, 0, 0), (1, 5, 2))]})
    made.save()
    found = compare(open_checkpoint(store, "a"), open_checkpoint(store, "b")).tensors["w"]
    assert (found.elements, found.differing, found.max_abs) == (60, 1, 3)


def test_boxes_follow_each_other_in_the_order_of_bytes(store):
    tensor = noise(torch.int16, (3, 4, 5))
    checkpoint = saved(store, "a", w=tensor, z=torch.tensor(1.0), e=torch.empty(0, 2**40))
    for bytes_max in (1, 2, 11, 40, 41, 1000):
        cut = list(boxes_of(checkpoint, "w", bytes_max=bytes_max))
        reader = BoxReader(checkpoint)
        parts = [part for batch in in_batches(cut, bytes_max=50) for part in reader.read(batch)]
        assert b"".join(bytes(bytes_of(part)) for part in parts) == bytes(bytes_of(tensor))
        assert max(box.length for box in cut) <= max(bytes_max, 2)
    assert [len(list(boxes_of(checkpoint, fqn))) for fqn in ("z", "e")] == [1, 1]


def test_damage_is_no_difference(store):
    made = Handmade(store, "b")
    made.tensor("w", torch.ones(4), {FILES[0]: [((0,), (3,))]})
    made.save()
    a = saved(store, "a", w=torch.ones(4))
    with pytest.raises(CorruptionError, match="1 of its elements are in no shard"):
        compare(a, open_checkpoint(store, "b"))
    with pytest.raises(CorruptionError, match="is quantized"):
        BoxReader(a).read([Box("w", torch.qint8, (0,), (4,))])
    with pytest.raises(CorruptionError, match="no tensor can have"):
        BoxReader(a).read([Box("w", torch.float32, (0,), (2**62, 2**62, 0))])
