"""Draw a share of the cases by a seed, because `.ci/run` has no time for all of them."""

import os
import random

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
SHARE = int(os.environ.get("TIERFS_TESTS_SHARE", "1"))


def drawn(cases, what):
    """Draw one in ``SHARE`` of the cases, at least one, and keep their order. ``what`` is part of the seed."""
    if SHARE == 1:
        return cases
    count = -(-len(cases) // SHARE)
    return [cases[number] for number in sorted(random.Random(f"{SEED} {what}").sample(range(len(cases)), count))]
