"""Any two of door, level, tiers, upkeep, host and change are used together, and no acknowledged byte is lost.

Another seed makes other draws: ``TIERFS_TEST_SEED=7``. `integration/test_store_pairs.py` makes many more.
"""

import os
import uuid

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from support.pairs import pairs, run_each
from support.store_pairs import AXES, World

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))


def test_draws_cover_each_pair_of_values():
    axes = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [None]}
    draws = pairs(axes, SEED)
    for one, two in (("a", "b"), ("a", "c"), ("b", "c"), ("a", "d")):
        assert {(draw[one], draw[two]) for draw in draws} == {(x, y) for x in axes[one] for y in axes[two]}
    assert len(draws) <= 8
    assert draws == pairs(axes, SEED)


def test_acknowledged_files_are_kept_and_garbage_is_not(tmp_path):
    world = World(f"tierfs::memory://pairs-{uuid.uuid4().hex}", tmp_path)
    try:
        run_each(pairs(AXES, SEED), world.run, SEED)
        world.clear()  # the processes go on with what they know of the chunks
        run_each(pairs(AXES, SEED + 1), world.run, SEED + 1)
        world.check()
    finally:
        world.close()
