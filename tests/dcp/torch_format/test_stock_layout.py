"""Saves with layout="dcp" load with torch's own readers and with TierReader, and are published whole or not at all."""

import os
import pickle

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.handmade import BoxPlanner
from test_writer import OPTIONS, noise, same, state
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.errors import AlreadyExistsError, CapacityError, InvalidInputError
from tierfs.store.write.sink import SlabSink

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support:UserWarning"),
]


@pytest.fixture
def root(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"


def save(url, saved, **kwargs):
    dcp.save(saved, storage_writer=TierWriter(url, layout="dcp", **OPTIONS, **kwargs))


def exported(url, directory):
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    fs.get(path, str(directory), recursive=True)
    return str(directory)


def readers(url, directory):
    yield FsspecReader(url, **OPTIONS)
    yield FileSystemReader(exported(url, directory))
    yield TierReader(url, **OPTIONS)


def cleared(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: cleared(inner) for key, inner in value.items()}
    return [cleared(inner) for inner in value] if isinstance(value, list) else type(value)()


def test_every_reader_reads_it(root, tmp_path):
    saved = state(3)
    save(f"{root}/run", saved)
    for reader in readers(f"{root}/run", tmp_path / "copy"):
        found = cleared(saved)
        dcp.load(found, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
        assert same(found, saved), reader
    assert {name.rpartition(".")[2] for name in os.listdir(tmp_path / "copy")} == {"metadata", "distcp"}


def test_torchs_tools_read_a_copy(root, tmp_path):
    saved = {"weight": noise(30, 20), "step": 4}
    save(f"{root}/run", saved)
    dcp_to_torch_save(exported(f"{root}/run", tmp_path / "copy"), tmp_path / "one.pt")
    assert same(torch.load(tmp_path / "one.pt", weights_only=True), saved)
    alone = _load_state_dict_from_keys("weight", storage_reader=FsspecReader(f"{root}/run", **OPTIONS))
    assert same(alone, {"weight": saved["weight"]})


def test_rows_and_columns_of_it_are_read(root, tmp_path):
    weight = noise(40, 30)
    save(f"{root}/run", {"weight": weight})
    boxes = [((0, 0), (40, 10)), ((5, 3), (7, 11)), ((39, 29), (1, 1))]
    for reader in readers(f"{root}/run", tmp_path / "copy"):
        planner = BoxPlanner({("weight", at): torch.zeros(sizes) for at, sizes in boxes})
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.plan(metadata), planner).wait()
        for (_, (row, column)), part in planner.wanted.items():
            assert same(part, weight[row : row + part.shape[0], column : column + part.shape[1]])


def test_a_save_that_is_staged_holds_what_was_there(root, tmp_path):
    saved, live = state(5), state(5)
    writer = TierWriter(f"{root}/run", layout="dcp", **OPTIONS)
    future = dcp.async_save(live, storage_writer=pickle.loads(pickle.dumps(writer)))
    live["model"]["embedding"].zero_()
    live["notes"].clear()
    future.result()
    for reader in readers(f"{root}/run", tmp_path / "copy"):
        found = cleared(saved)
        dcp.load(found, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
        assert same(found, saved), reader


def test_a_state_larger_than_the_ram_tier_is_saved(root, tmp_path):
    options = {"ram": "64MiB", "nvme": "256MiB", "state_dir": str(tmp_path / "small")}
    saved = {f"layer{number}": noise(5 << 20, seed=number) for number in range(5)}
    live = cleared(saved)
    for name, tensor in saved.items():
        live[name].copy_(tensor)
    future = dcp.async_save(live, storage_writer=TierWriter(f"{root}/run", layout="dcp", ack="local", **options))
    live["layer3"].zero_()
    future.result()
    found = cleared(saved)
    dcp.load(found, storage_reader=FsspecReader(f"{root}/run", **options))
    assert same(found, saved)


def test_an_error_of_the_store_is_not_covered_by_torchs(root, monkeypatch):
    def full(*_):
        raise CapacityError("full")

    monkeypatch.setattr(SlabSink, "write", full)
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save({"w": noise(5 << 20)}, storage_writer=TierWriter(f"{root}/run", layout="dcp", **OPTIONS))
    assert isinstance(raised.value.failures[0][0], CapacityError), raised.value


class Unsavable(torch.Tensor):
    """Fails to serialize, in the middle of its file."""

    def __reduce_ex__(self, protocol):
        raise OSError("this tensor cannot be serialised")


def test_a_save_that_breaks_off_leaves_the_checkpoint_that_was_there(root):
    before = {"weight": noise(300, 200), "more": noise(9)}
    save(f"{root}/run", before)
    fs, path = fsspec.url_to_fs(f"{root}/run", **OPTIONS)
    files = set(fs.ls(path, detail=False))
    broken = {"weight": noise(300, 200, seed=1), "more": noise(9, seed=1).as_subclass(Unsavable)}
    with pytest.raises(dcp.CheckpointException):
        save(f"{root}/run", broken)
    assert set(fs.ls(path, detail=False)) == files
    found = cleared(before)
    dcp.load(found, storage_reader=FsspecReader(f"{root}/run", **OPTIONS))
    assert same(found, before)


def test_a_new_save_takes_the_place_of_the_old_one_at_once_and_only_if_it_may(root):
    save(f"{root}/run", {"weight": noise(30)})
    with pytest.raises(dcp.CheckpointException) as raised:
        save(f"{root}/run", {"weight": noise(30, seed=1)}, overwrite=False)
    assert isinstance(raised.value.failures[0][0], AlreadyExistsError)
    old = pickle.loads(fsspec.open(f"{root}/run/.metadata", **OPTIONS).open().read())
    save(f"{root}/run", {"weight": noise(30, seed=2)})
    new = pickle.loads(fsspec.open(f"{root}/run/.metadata", **OPTIONS).open().read())
    names = [{info.relative_path for info in metadata.storage_data.values()} for metadata in (old, new)]
    assert not names[0] & names[1], "what the old metadata names may not be overwritten"
    found = {"weight": torch.zeros(30)}
    dcp.load(found, storage_reader=FsspecReader(f"{root}/run", **OPTIONS))
    assert same(found["weight"], noise(30, seed=2))


def test_without_collectives_each_rank_has_metadata_of_its_own(root):
    dcp.save(
        {"weight": noise(30)}, storage_writer=TierWriter(f"{root}/run", layout="dcp", **OPTIONS), use_collectives=False
    )
    found = {"weight": torch.zeros(30)}
    dcp.load(found, storage_reader=FsspecReader(f"{root}/run", **OPTIONS))
    assert same(found["weight"], noise(30))


def test_there_is_no_third_layout(root):
    with pytest.raises(InvalidInputError, match="layout must be 'tierfs' or 'dcp', not 'stock'"):
        TierWriter(root, layout="stock")
