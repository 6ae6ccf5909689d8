"""A forked worker of a `DataLoader` uses the readers, writers and filesystems of its parent."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fsspec
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset

import tierfs
from tierfs.dcp import TierReader, TierWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
LARGE = 1 << 18


class Steps(Dataset):
    """Loads a step and saves the next one, with objects that the parent opened and used."""

    def __init__(self, reader, writer, fs, root):
        self.reader, self.writer, self.fs, self.root = reader, writer, fs, root

    def __len__(self):
        return 2

    def __getitem__(self, at):
        state = {"weight": torch.zeros(LARGE)}
        self.reader.reset(f"{self.root}/step_{at}")
        dcp.load(state, storage_reader=self.reader)
        assert self.fs.status()["tiers"]["ram"]
        self.fs.pipe(f"{self.root}/seen_{at}", bytes(LARGE))
        state["weight"] += 1
        self.writer.reset(f"{self.root}/step_{at + 1}")
        dcp.save(state, storage_writer=self.writer)
        return state["weight"]


def test_a_forked_worker_loads_and_saves_with_its_parents_reader_and_writer(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    root = f"tierfs::file://{tmp_path}/store/run"
    tiers = {"ram": "64MiB", "nvme": "0", "state_dir": str(tmp_path / "state")}
    fs, _ = fsspec.url_to_fs(root, **tiers)
    reader, writer = TierReader(f"{root}/step_0", **tiers), TierWriter(f"{root}/step_0", **tiers)
    first = {"weight": torch.rand(LARGE)}
    dcp.save(first, storage_writer=writer)
    dcp.load({"weight": torch.zeros(LARGE)}, storage_reader=reader)
    assert fs.exists(f"{root}/step_0")
    steps = list(
        DataLoader(Steps(reader, writer, fs, root), batch_size=None, num_workers=1, multiprocessing_context="fork")
    )
    assert torch.equal(steps[1], first["weight"] + 1 + 1)
    assert fs.cat(f"{root}/seen_1") == bytes(LARGE)
    last = {"weight": torch.zeros(LARGE)}
    dcp.load(last, storage_reader=TierReader(f"{root}/step_2", **tiers))
    assert torch.equal(last["weight"], steps[1])
    writer.reset(f"{root}/step_3")
    dcp.save(first, storage_writer=writer)
    fs.wait(root)
