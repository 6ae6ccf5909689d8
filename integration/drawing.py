"""One in so many of what there is to try, drawn by the seed: `.ci/run` has no time for all of it."""

import os
import random

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
SHARE = int(os.environ.get("TIERFS_TESTS_SHARE", "1"))


def drawn(cases, what):
    """One in ``SHARE`` of these, one at least, in their order. ``what`` they are: each of them draws others."""
    if SHARE == 1:
        return cases
    count = -(-len(cases) // SHARE)
    return [cases[number] for number in sorted(random.Random(f"{SEED} {what}").sample(range(len(cases)), count))]
