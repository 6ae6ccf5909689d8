"""``torch_checkpointing`` on two ranks with its saving process: the store holds its saves, and they load."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed: the dev extra has it")

import fsspec
from torchrun import torchrun

import tierfs

TRAINER = Path(__file__).parent / "checkpointing_trainer.py"


def test_two_ranks_save_and_load(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    root = f"tierfs::file://{tmp_path}/store/run"
    torchrun(tmp_path, TRAINER, root)
    fs, path = fsspec.url_to_fs(root)
    assert [name.rpartition("/")[2] for name in fs.ls(path, detail=False)] == ["async-1", "async-2", "sync-1", "sync-2"]
    for name in fs.ls(path, detail=False):
        files = {file.rpartition("/")[2] for file in fs.ls(name, detail=False)}
        assert files == {f"{item}_{rank}.pt" for item in ("model", "step") for rank in (0, 1)}
    fs.wait(path, "object", timeout=60)
