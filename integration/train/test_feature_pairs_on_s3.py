"""Each pair of the manager's features works together on S3, with a bucket that is slow or away for a while.

``TIERFS_TRAIN_DRAWS=100`` makes at least so many draws, from ``TIERFS_TEST_SEED`` on.
"""

import itertools
import os
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import s3server
import torch.distributed as dist

import tierfs
from tierfs.testing.tcpproxy import TcpFaultProxy

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.training_draws import LAST, Draw, covering
from support.training_lives import Lives

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
COUNT = int(os.environ.get("TIERFS_TRAIN_DRAWS", "28"))
DRAWS = list(itertools.islice(itertools.chain.from_iterable(map(covering, itertools.count(SEED))), COUNT))


@pytest.fixture(scope="module")
def proxy():
    s3server.require()
    with s3server.running() as port, TcpFaultProxy("127.0.0.1", port) as proxy:
        yield proxy


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


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: "-".join(str(value) for value in draw.values()))
def test_each_pair_of_features_works_together(lives, uninterrupted, proxy, tmp_path, draw):
    print(f"TIERFS_TEST_SEED={SEED}: {draw}")
    options = {"s3": s3server.options(proxy.port)}
    root = f"tierfs::s3://{s3server.new_bucket(proxy.target[1])}/store"
    tierfs.init(root.removeprefix("tierfs::"), options=options["s3"])

    def trouble(drawn):
        if drawn.draw["bucket"] == "slow":
            proxy.latency_s = 0.03
        elif drawn.draw["bucket"] == "away":
            proxy.refuse = True
            timer = threading.Timer(1.5, lambda: setattr(proxy, "refuse", False))
            timer.start()
            return timer
        return None

    try:
        Draw(lives, tmp_path, draw, root, options).check(uninterrupted(draw), trouble)
    finally:
        proxy.latency_s, proxy.refuse = 0.0, False
