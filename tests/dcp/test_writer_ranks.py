"""TierWriter with two ranks: the checkpoint has every rank's part, or does not exist."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
from support import writer_ranks
from support.torch_ranks import run_world

import tierfs

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The problems that each rank found, by scenario."""
    directory = tmp_path_factory.mktemp("writer-ranks")
    tierfs.init(f"file://{directory}/store")
    run_world(writer_ranks.main, writer_ranks.WORLD, directory, f"tierfs::file://{directory}/store")
    return [json.loads((directory / f"outcomes-{rank}.json").read_text()) for rank in range(writer_ranks.WORLD)]


@pytest.mark.parametrize("scenario", writer_ranks.SCENARIOS)
def test_two_ranks(outcomes, scenario):
    problems = [found[scenario] for found in outcomes if found[scenario]]
    assert not problems, "\n".join(problems)
