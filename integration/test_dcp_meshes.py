"""TierWriter and TierReader on meshes of two and four gloo ranks: saved states load on any mesh."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import dcp_mesh_worker
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.torch_ranks import run_world

import tierfs

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Run the cases that this session asks for. Return what each rank says of each case, by the size of the world."""
    asked, found = {}, {}
    for item in request.session.items:
        if item.path == request.path:
            asked.setdefault(item.callspec.params["size"], []).append(item.callspec.params["case"])
    for size, cases in asked.items():
        directory = tmp_path_factory.mktemp(f"world-of-{size}")
        tierfs.init(f"file://{directory}/store")
        run_world(dcp_mesh_worker.main, size, size, directory, f"tierfs::file://{directory}/store", cases)
        found[size] = [json.loads((directory / f"outcomes-{size}-{rank}.json").read_text()) for rank in range(size)]
    return found


@pytest.mark.parametrize(
    ("size", "case"), [(size, case.__name__) for size, cases in dcp_mesh_worker.CASES.items() for case in cases]
)
def test_ranks_on_meshes(outcomes, size, case):
    problems = [found.get(case, "a case before this one failed") for found in outcomes[size]]
    assert not any(problems), "\n".join(problems)
