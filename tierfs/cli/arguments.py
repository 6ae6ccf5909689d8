"""How a command is declared, the arguments that several commands share, and checks of them.

Cheap to import: ``--help`` and the flusher load it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level
from tierfs.units import parse_size

if TYPE_CHECKING:
    from concurrent.futures import Executor

PLACE = "tierfs:: URL, URL of the object tier, or local path"
"""Help text of an argument that `tierfs.cli.files.places.store_place` resolves."""
LEVELS = f"{{{','.join(level.label for level in Level if level)}}}"
"""The value of an option that is a level, in a usage."""
Arguments: TypeAlias = Mapping[str, str] | Callable[[argparse.ArgumentParser], object]
"""Arguments by usage, each with its help text (see `add_arguments`), or a function that declares them on a parser."""


class Command(NamedTuple):
    """A command of ``tierfs``.

    Attributes:
        line: What it does, as ``--help`` shows it.
        examples: Lines that call it, with their arguments.
        arguments: What it takes.
        actions: For a command with actions, the line and the arguments of each action by its name.
        run: Called with the parsed arguments. Returns the exit code.
    """

    line: str
    examples: Sequence[str]
    arguments: Sequence[Arguments]
    actions: Mapping[str, tuple[str, Sequence[Arguments]]]
    run: Callable[[argparse.Namespace], int]


loaded: dict[str, Command] = {}
"""The commands of the modules that this process has imported."""
_Run = TypeVar("_Run", bound=Callable[[argparse.Namespace], int])


def command(
    name: str,
    line: str,
    examples: str,
    *arguments: Arguments,
    actions: Mapping[str, tuple[str, Sequence[Arguments]]] = MappingProxyType({}),
) -> Callable[[_Run], _Run]:
    """Make a function a command. The arguments are those of `Command`."""

    def register(run: _Run) -> _Run:
        loaded[name] = Command(line, inspect.cleandoc(examples).splitlines(), arguments, actions, run)
        return run

    return register


_USAGE = re.compile(r"((?:-\S+ ?)+|[a-z]+ )(?:([A-Z]+|\{.+\})(\.\.\.|[?*+])?(?::(int|float|size))?(?:=(.+))?)?")


def add_arguments(parser: argparse._ActionsContainer, arguments: Mapping[str, str]) -> None:
    """Declare arguments, each by its usage and its help text.

    A usage is ``-r --recursive`` for a switch, and for an option with a value ``--rate N``, ``--rate N:float=3000``,
    ``--length N:size``, ``--tier {ram,nvme}=nvme`` or, if it may be given several times, ``--keep RULE...``. A usage
    that begins with the name of an attribute, like ``directory DIR``, is a positional argument. It may end with ``?``,
    ``*`` or ``+``.
    """
    for usage, text in arguments.items():
        found = _USAGE.fullmatch(usage)
        assert found, usage
        names, value, many, kind, default = found.groups()
        how: dict[str, Any] = {"help": text}
        if value is None:
            how["action"] = "store_true"
        elif many == "...":
            how |= {"metavar": value, "action": "append", "default": []}
        elif value.startswith("{"):
            how |= {"choices": value[1:-1].split(","), "default": default}
        else:
            convert = _KINDS[kind]
            how |= {"metavar": value, "type": convert, "default": None if default is None else convert(default)}
            how |= {"nargs": many} if many else {}
        parser.add_argument(*names.split(), **how)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_KINDS: dict[str | None, Callable[[str], Any]] = {None: str, "int": int, "float": float, "size": _size}
URL = {"url URL": PLACE}
TIER = {"--tier {ram,nvme}=nvme": "the host's shared memory, or its disk (default: nvme)"}


def progress_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--progress`` and ``--no-progress``."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show progress on stderr (default: if stderr is a terminal, after a second)",
    )


def replicas_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--from``, which collects URLs in the list ``arguments.replicas``."""
    parser.add_argument(
        "--from",
        dest="replicas",
        action="append",
        default=[],
        metavar="URL",
        help="a copy of the store, or another store that may hold the same content, to heal from; may be given several times",
    )


def without_json(parser: argparse.ArgumentParser) -> None:
    """Declare a command that has no ``--json``."""
    parser.set_defaults(json=False)


def suggested(*words: str) -> str:
    """Return a command of tierfs for a message: quoted for a shell, in backticks."""
    return f"`{shlex.join(['tierfs', *words])}`"


def require_seconds(option: str, seconds: float, *, over_0: bool = False, may_be_infinite: bool = False) -> None:
    """Check a duration.

    Raises:
        InvalidInputError: It is negative, 0 with ``over_0``, or infinite without ``may_be_infinite``.
    """
    is_enough = seconds > 0 if over_0 else seconds >= 0
    if not is_enough or (math.isinf(seconds) and not may_be_infinite):
        raise InvalidInputError(f"{option} {seconds:g}: give a number of seconds {'over 0' if over_0 else 'from 0 on'}")


def require_torch(task: str) -> None:
    """Check that torch is installed, without importing it. ``task`` is a clause like ``checkpoints are read``.

    Raises:
        InvalidInputError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InvalidInputError(f"{task} with torch, which is not installed: pip install 'tierfs[torch]'")


PROCESSES_MAX = 1024


EXECUTOR = {
    "--executor WHERE": "spread the work: processes:N on this host, dask:ADDRESS of a Dask scheduler, or mpi under mpiexec -m mpi4py.futures (default: in this process)",
}


@contextlib.contextmanager
def open_executor(text: str | None) -> Iterator[tuple[Executor | None, int]]:
    """Open the executor that ``--executor`` names, for the duration of a ``with`` block.

    A function that it runs opens its store by URL in its own process. It depends only on its arguments, so the executor
    may run it again elsewhere.

    Yields:
        The executor, and the number of pieces that it runs at once. Without the option, the executor is None, and the
        work runs in this process.

    Raises:
        InvalidInputError: The option's value is invalid, or the package that it needs is not installed.
    """
    if text is None:
        yield None, 1
        return
    name, _, argument = text.partition(":")
    with contextlib.ExitStack() as opened:
        if name == "processes":
            if not argument.isdecimal() or not 1 <= int(argument) <= PROCESSES_MAX:
                raise InvalidInputError(f"--executor {text}: write processes:N, N from 1 to {PROCESSES_MAX}")
            yield opened.enter_context(_processes(int(argument))), int(argument)
        elif name == "dask":
            yield _dask(argument, opened)
        elif name == "mpi":
            yield _mpi(opened)
        else:
            raise InvalidInputError(f"--executor {text}: choose processes:N, dask:ADDRESS or mpi")


def _processes(count: int) -> Executor:
    import multiprocessing  # noqa: PLC0415 - only this option needs it
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

    # A forked child would inherit locks that other threads of this process hold.
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def _dask(address: str, opened: contextlib.ExitStack) -> tuple[Executor, int]:
    try:
        from distributed import Client  # noqa: PLC0415 - the package is optional
    except ImportError as error:
        raise InvalidInputError(f"--executor dask needs the package distributed: {error}") from error
    if not address:
        raise InvalidInputError("--executor dask: write dask:tcp://HOST:PORT of the scheduler")
    client = opened.enter_context(Client(address))
    # Dask runs a piece again, at most twice, if its worker is lost.
    return client.get_executor(retries=2, pure=False), max(1, sum(client.ncores().values()))


def _mpi(opened: contextlib.ExitStack) -> tuple[Executor, int]:
    try:
        from mpi4py import MPI  # noqa: PLC0415 - the package is optional
        from mpi4py.futures import MPIPoolExecutor  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise InvalidInputError(f"--executor mpi needs mpi4py and an MPI library: {error}") from error
    executor = opened.enter_context(MPIPoolExecutor())
    return executor, max(1, MPI.COMM_WORLD.Get_size() - 1)
