"""Each pair of the manager's features works together: see `support.training_draws`.

``TIERFS_TEST_SEED`` chooses other draws. `integration/train/test_feature_pairs_on_s3.py` draws more, on S3.
"""

import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import torch.distributed as dist
from support.training_draws import LAST, Draw, covering
from support.training_lives import Lives

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
DRAWS = covering(SEED)[:6]  # each value of each feature occurs with seed 1


@pytest.fixture(scope="module")
def processes():
    return Lives()


@pytest.fixture
def lives(processes):
    yield processes
    processes.kill()


@pytest.fixture(scope="module")
def uninterrupted(processes, tmp_path_factory):
    """Return the losses of an uninterrupted run, by rank and step. Each kind of run is made once."""
    found = {}

    def losses(draw):
        key = draw["loader"], draw["ranks"]
        if key not in found:
            found[key] = processes.straight(tmp_path_factory.mktemp("straight"), *key, LAST)
        return found[key]

    return losses


def stop_the_flusher(draw):
    """Let nothing reach the bucket for a while, or only now and then."""
    pauses = {"slow": [0.05] * 6, "away": [0.8]}.get(draw.draw["bucket"], [])
    if not pauses:
        return
    with draw.manager() as run:
        flusher = {}
        while "pid" not in flusher:  # the first save starts it
            time.sleep(0.01)
            flusher = run._writer.status()["flusher"]  # nothing public tells the flusher of a store

    def pause():
        for pause_s in pauses:
            os.kill(flusher["pid"], signal.SIGSTOP)
            time.sleep(pause_s)
            os.kill(flusher["pid"], signal.SIGCONT)
            time.sleep(0.05)

    threading.Thread(target=pause).start()


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: "-".join(str(value) for value in draw.values()))
def test_each_pair_of_features_works_together(lives, uninterrupted, root, tmp_path, draw):
    print(f"TIERFS_TEST_SEED={SEED}: {draw}")
    run = Draw(lives, tmp_path, draw, root.removesuffix("/run"), {})
    run.check(uninterrupted(draw), stop_the_flusher)
