"""Start a training as users do, with torchrun: two ranks on this host."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

DEADLINE_S = 200
RANKS = 2


def require_entry_point():
    """Skip if torch would not find tierfs."""
    if not any(entry.value.startswith("tierfs.") for entry in entry_points(group="torch.backends")):
        pytest.skip("tierfs was installed before it had an entry point for torch: install it again")


def torchrun(directory, program, *arguments, **variables):
    """Run a program that prints DONE on every rank.

    Args:
        directory: Working directory.
        program: Path of the program.
        *arguments: Arguments of the program.
        **variables: Environment variables of the program.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with subprocess.Popen(
        [*command, str(program), *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            said, errors = running.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            running.terminate()  # on SIGTERM, torchrun also ends its workers
            raise
    assert running.returncode == 0, errors
    assert said.count("DONE") == RANKS, said
