"""Run an example that trains, and kill it with all its processes after a step. torchrun's workers have own groups."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

DEADLINE_S = 200
_LOSS = re.compile(r"step (\d+) loss (\S+)")


def trained(directory, *command, kill=None, **variables):
    """Return the losses by step, the other lines and the exit code.

    Args:
        directory: Working directory.
        *command: Arguments of Python.
        kill: A step and a signal. All processes of the training get the signal after the step.
        **variables: Environment variables.
    """
    losses, said = {}, []
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        late = threading.Timer(DEADLINE_S, _signal, (running.pid, signal.SIGKILL))
        late.start()
        try:
            for line in running.stdout:
                found = _LOSS.search(line)
                if found is None:
                    said.append(line)
                    continue
                losses[int(found[1])] = float(found[2])
                if kill is not None and int(found[1]) == kill[0]:
                    _signal(running.pid, kill[1])
                    kill = None
        finally:
            late.cancel()
    return losses, "".join(said), running.returncode


def _signal(parent, number):
    processes = [parent]
    for pid in processes:
        processes += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in processes:
        os.kill(pid, number)
