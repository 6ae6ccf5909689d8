"""TierWriter and TierReader on meshes of two and four gloo ranks: saved states load on any mesh."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import dcp_mesh_worker
import torch.distributed as dist
import torch.multiprocessing as mp

import tierfs

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    found = {}
    for size in dcp_mesh_worker.CASES:
        directory = tmp_path_factory.mktemp(f"world-of-{size}")
        tierfs.init(f"file://{directory}/store")
        mp.spawn(dcp_mesh_worker.main, (size, directory, f"tierfs::file://{directory}/store"), nprocs=size)
        found[size] = [json.loads((directory / f"outcomes-{size}-{rank}.json").read_text()) for rank in range(size)]
    return found


@pytest.mark.parametrize(
    ("size", "case"), [(size, case.__name__) for size, cases in dcp_mesh_worker.CASES.items() for case in cases]
)
def test_ranks_on_meshes(outcomes, size, case):
    problems = [found.get(case, "a case before this one failed") for found in outcomes[size]]
    assert not any(problems), "\n".join(problems)
