"""Two ranks make their logged steps again, each its own shards, after both were killed."""

import signal

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import torch.distributed as dist
from support import replay_ranks
from support.torch_ranks import run_world, zygote

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


def killed(life, *arguments):
    """Run ranks that kill themselves."""
    ranks = [zygote.start(life, rank, *arguments) for rank in range(replay_ranks.WORLD)]
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * replay_ranks.WORLD


@pytest.mark.parametrize(
    ("wrap", "case"),
    [(wrap, case) for wrap in ("ddp", "fsdp") for case in range(len(replay_ranks.CASES))] + [("hsdp", 0)],
)
def test_killed_ranks_go_on_from_the_last_step_that_both_logged(root, tmp_path, wrap, case):
    killed(replay_ranks.first_life, tmp_path, root, wrap, case)
    run_world(replay_ranks.second_life, replay_ranks.WORLD, tmp_path, root, wrap, case)


@pytest.mark.parametrize("case", range(len(replay_ranks.PARTS)))
def test_ranks_log_from_the_first_step_what_no_gradient_says(root, tmp_path, case):
    killed(replay_ranks.first_life_of_part, tmp_path, root, case)
    run_world(replay_ranks.second_life_of_part, replay_ranks.WORLD, tmp_path, root, case)
