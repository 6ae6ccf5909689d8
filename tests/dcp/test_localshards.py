"""Plain local tensors that describe their shards of a larger tensor (torch 2.14) are treated as that tensor."""

import copy
import importlib.util
from multiprocessing.reduction import ForkingPickler

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tierfs.checkpoint.catalog import candidates, standing
from tierfs.checkpoint.export import state_of
from tierfs.checkpoint.verify import verify_checkpoint
from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.dcp.tensorbytes import holds_shards, shards_of
from tierfs.errors import InvalidInputError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch.distributed.checkpoint.protocol") is None,
        reason="this torch knows no CheckpointableTensor (it came with 2.14)",
    ),
]
FULL = torch.arange(48.0).reshape(8, 6)
PADDED = [((0, 0), (0, 0), (3, 6)), ((3, 0), (4, 1), (3, 6)), ((6, 0), (8, 2), (2, 6))]
ROWS = [((0, 0), (0, 0), (4, 6)), ((4, 0), (4, 0), (4, 6))]
COLUMNS = [((0, 0), (0, 0), (8, 2)), ((0, 2), (0, 4), (8, 4))]
LAYOUTS = {
    "padded": ((10, 8), PADDED),
    "rows": ((8, 6), ROWS),
    "columns": ((8, 8), COLUMNS),
    "one": ((8, 6), [((0, 0), (0, 0), (8, 6))]),
}


class OwnFields(torch.Tensor):
    """A tensor whose class has the attributes that describe shards."""

    global_shape = (8, 6)
    global_offsets = tuple(part[0] for part in ROWS)
    local_offsets = tuple(part[1] for part in ROWS)
    local_sizes = tuple(part[2] for part in ROWS)


def part_of(tensor, offsets, sizes):
    return tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def local(name, fill=None, shape=(8, 6)):
    """Return a buffer with shards of `FULL`, or of one value. Its padding is -9."""
    size, parts = LAYOUTS[name]
    buffer = torch.full(size, -9.0)
    for offsets, inside, sizes in parts:
        part_of(buffer, inside, sizes)[...] = part_of(FULL, offsets, sizes) if fill is None else fill
    buffer.global_shape = shape
    buffer.global_offsets, buffer.local_offsets, buffer.local_sizes = zip(*parts, strict=True)
    return buffer


@pytest.fixture
def where(url):
    return f"tierfs::{url}/run"


def loaded(where):
    found = {"w": torch.zeros(8, 6)}
    dcp.load(found, storage_reader=TierReader(where))
    return found["w"]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("later", [False, True])
def test_shards_are_saved_as_the_tensor_that_they_are_of(where, name, later):
    writer = TierWriter(where)
    tensor = local(name)
    if later:
        future = dcp.async_save({"w": tensor, "n": 1}, storage_writer=writer)
        tensor.fill_(0)
        future.result()
    else:
        dcp.save({"w": tensor, "n": 1}, storage_writer=writer)
    assert torch.equal(loaded(where), FULL)
    into = local(name, fill=0.5)
    dcp.load({"w": into}, storage_reader=TierReader(where))
    assert torch.equal(into, local(name))


@pytest.mark.parametrize("later", [False, True])
def test_a_class_may_have_the_fields(where, later):
    state = {"w": FULL.clone().as_subclass(OwnFields)}
    writer = TierWriter(where)
    dcp.async_save(state, storage_writer=writer).result() if later else dcp.save(state, storage_writer=writer)
    assert torch.equal(loaded(where), FULL)
    assert len(open_checkpoint(*Address.of(where, {}).open()).shards("w")) == 2


def test_a_parameter_and_a_second_name_keep_their_shards(where):
    parameter = torch.nn.Parameter(local("padded").detach())
    for name, value in shards_of(local("padded")).items():
        setattr(parameter, name, value)
    writer = TierWriter(where)
    for _ in range(2):
        dcp.async_save({"w": parameter, "n": {"tied": parameter}}, storage_writer=writer).result()
        assert torch.equal(loaded(where), FULL)


def test_local_shards_are_listed_and_exported_as_one_tensor(where):
    dcp.async_save({"w": local("padded")}, storage_writer=TierWriter(where, ack="object")).result()
    store, directory = Address.of(where, {}).open()
    [candidate] = candidates(store, directory)
    assert (standing(store, candidate).state, standing(store, candidate).length) == ("complete", FULL.nbytes)
    checkpoint = open_checkpoint(store, directory)
    assert not verify_checkpoint(checkpoint).damage
    assert torch.equal(state_of(checkpoint)["w"], FULL)


def test_a_staged_state_keeps_them_and_goes_to_no_process(where):
    staged = TierWriter(where, ram="0", nvme="0").stage({"w": local("padded"), "plain": torch.ones(2)})
    for passed in (copy.deepcopy(staged), dict(staged)):
        assert shards_of(passed["w"]) == shards_of(local("padded"))
        assert not holds_shards(passed["plain"])
    with pytest.raises(InvalidInputError, match=r"AsyncCheckpointerType\.THREAD"):
        ForkingPickler.dumps(staged)


def test_shards_that_leave_a_gap_do_not_load_as_the_whole(where):
    tensor = local("rows")
    for name in ("global_offsets", "local_offsets", "local_sizes"):
        setattr(tensor, name, getattr(tensor, name)[:1])
    dcp.async_save({"w": tensor}, storage_writer=TierWriter(where)).result()
    into = copy.deepcopy(tensor).zero_()
    dcp.load({"w": into}, storage_reader=TierReader(where))
    assert torch.equal(into[:4], FULL[:4])
    with pytest.raises(CheckpointException, match="24 of its elements are in no shard"):
        loaded(where)


@pytest.mark.parametrize(
    "wrong", [{"global_shape": (7, 6)}, {"local_sizes": ((4, 6),)}, {"local_offsets": ((0, 0), (7, 0))}]
)
def test_shards_that_cannot_be_are_refused(where, wrong):
    tensor = local("rows")
    for name, value in wrong.items():
        setattr(tensor, name, value)
    for save in (dcp.save, lambda *args, **kwargs: dcp.async_save(*args, **kwargs).result()):
        with pytest.raises(CheckpointException):
            save({"w": tensor}, storage_writer=TierWriter(where))
