"""A failed test says how it is repeated: its seeds, and one command with the variables that this run has."""

import os
import secrets
import shlex

PREFIXES = ("TIERFS_TEST", "TIERFS_STATEFUL", "TIERFS_TRAIN", "TIERFS_SOAK")
"""The variables that choose or bound what tests draw. Those for a whole run are left out: one test has no order."""
_OF_A_RUN = ("TIERFS_TEST_ORDER", "TIERFS_TESTS_UNTIL")


def draw_seed(config):
    """Choose Hypothesis' seed for this run, if nobody has. Workers have the options of their controller."""
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(secrets.randbelow(1 << 31))


def add_command(item, report):
    """Add a section with the command to the report of a failed test."""
    if not report.failed:
        return
    variables = {name: text for name, text in os.environ.items() if name.startswith(PREFIXES)}
    variables = {name: text for name, text in variables.items() if name not in _OF_A_RUN}
    seed = item.config.getoption("--hypothesis-seed", None)
    words = [*(f"{name}={shlex.quote(text)}" for name, text in sorted(variables.items())), ".venv/bin/python -m pytest"]
    words += [shlex.quote(item.nodeid), *([f"--hypothesis-seed={seed}"] if seed is not None else [])]
    report.sections.append(("to repeat it", " ".join(words)))
