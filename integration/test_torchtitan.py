"""torchtitan's checkpoint manager with ``folder`` in a store saves, lists, resumes and purges by the URL alone."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip(
    "torchtitan.components.checkpoint",
    reason="torchtitan is not installed: docs/how-to/integration-tests.md has the command",
)

import fsspec
from torchrun import require_entry_point, torchrun

import tierfs

TRAINER = Path(__file__).parent / "titan_trainer.py"


@pytest.mark.parametrize("dcp", ["0", "1"])
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_training_that_is_resumed_ends_as_one_that_is_not(tmp_path, mode, dcp):
    if dcp == "1":
        require_entry_point()
    tierfs.init(f"file://{tmp_path}/store")
    root = f"tierfs::file://{tmp_path}/store/run"
    torchrun(tmp_path, TRAINER, root, mode, TIERFS_DCP=dcp)
    for run in ("whole", "parts"):
        fs, path = fsspec.url_to_fs(f"{root}/{run}")
        steps = {int(name.rpartition("-")[2]) for name in fs.ls(path, detail=False)}
        # keep_latest_k=2 applies before the save in flight is listed, and not at the last step.
        assert {4, 5, 6} <= steps <= {3, 4, 5, 6}
        for step in steps:
            assert fs.cat_file(f"{path}/step-{step}/.metadata")[:1] == (b"{" if dcp == "1" else b"\x80")
            shards = [name for name in fs.ls(f"{path}/step-{step}", detail=False) if not name.endswith(".metadata")]
            assert all(name.endswith(".safetensors" if dcp == "1" else ".distcp") for name in shards)
            assert len(shards) == 2
    fs.wait(path, "object", timeout=60)
