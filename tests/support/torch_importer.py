"""Processes in which torch's import is about to end: forks of one that has imported torch, and no part of tierfs."""

import contextlib
import os
import sys
import traceback
import warnings

from support.zygote import Zygote

zygote = Zygote("torch.distributed.checkpoint")


def run(program, output, environment, monkeypatch):
    """Run a program in a new process. Return its status.

    Args:
        program: It calls ``torch._import_device_backends()``, as torch does at the end of its import.
        output: A file for what it writes and says.
        environment: All its variables. ``PYTHONPATH`` has the entry points.
        monkeypatch: Keeps the server from these calls.
    """
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    process = zygote.start(_run, program, str(output), environment)
    process.join()
    return process.exitcode


def _run(program, output, environment):
    assert not [name for name in sys.modules if name.partition(".")[0] == "tierfs"]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    warnings.simplefilter("ignore")
    with (
        open(output, "w", encoding="utf-8") as file,
        contextlib.redirect_stderr(file),
        contextlib.redirect_stdout(file),
    ):
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            raise
