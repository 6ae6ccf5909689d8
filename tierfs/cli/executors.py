"""``--executor``: choose the machines that run pieces of work.

A function that an executor runs opens its store by URL in its own process. It depends only on its arguments, so the
executor may run it again elsewhere.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import NamedTuple

from tierfs.errors import InvalidInputError

PROCESSES_MAX = 1024


class WorkerSet(NamedTuple):
    """An executor, and the number of pieces that it runs at once."""

    executor: Executor
    workers: int


EXECUTOR = {
    "--executor WHERE": "spread the work: processes:N on this host, dask:ADDRESS of a Dask scheduler, or mpi under mpiexec -m mpi4py.futures (default: in this process)",
}


@contextlib.contextmanager
def open_executor(text: str | None) -> Iterator[WorkerSet | None]:
    """Open the executor that ``--executor`` names, for the duration of a ``with`` block.

    Yields:
        None if the option is not given: the work runs in this process.

    Raises:
        InvalidInputError: The option's value is invalid, or the package that it needs is not installed.
    """
    if text is None:
        yield None
        return
    name, _, argument = text.partition(":")
    with contextlib.ExitStack() as opened:
        if name == "processes":
            if not argument.isdecimal() or not 1 <= int(argument) <= PROCESSES_MAX:
                raise InvalidInputError(f"--executor {text}: write processes:N, N from 1 to {PROCESSES_MAX}")
            context = multiprocessing.get_context(
                "spawn"
            )  # a forked child would inherit locks that other threads of this process hold
            executor: Executor = opened.enter_context(ProcessPoolExecutor(int(argument), mp_context=context))
            found = WorkerSet(executor, int(argument))
        elif name == "dask":
            found = _dask(argument, opened)
        elif name == "mpi":
            found = _mpi(opened)
        else:
            raise InvalidInputError(f"--executor {text}: choose processes:N, dask:ADDRESS or mpi")
        yield found


def _dask(address: str, opened: contextlib.ExitStack) -> WorkerSet:
    try:
        from distributed import Client  # noqa: PLC0415 - the package is optional
    except ImportError as error:
        raise InvalidInputError(f"--executor dask needs the package distributed: {error}") from error
    if not address:
        raise InvalidInputError("--executor dask: write dask:tcp://HOST:PORT of the scheduler")
    client = opened.enter_context(Client(address))
    # Dask runs a piece again, at most twice, if its worker is lost.
    return WorkerSet(client.get_executor(retries=2, pure=False), max(1, sum(client.ncores().values())))


def _mpi(opened: contextlib.ExitStack) -> WorkerSet:
    try:
        from mpi4py import MPI  # noqa: PLC0415 - the package is optional
        from mpi4py.futures import MPIPoolExecutor  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise InvalidInputError(f"--executor mpi needs mpi4py and an MPI library: {error}") from error
    executor = opened.enter_context(MPIPoolExecutor())
    return WorkerSet(executor, max(1, MPI.COMM_WORLD.Get_size() - 1))
