"""What is around every command: finding it, parsing its arguments, and turning errors into exit codes.

A command is a module of `tierfs.cli.commands` with ``NAME``, ``HELP``, ``EXAMPLES``, ``add_arguments`` and ``run``. Only the one
that is asked for is imported, so that a quick command is not slowed down by what another one needs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from tierfs import __version__
from tierfs.cli.failures import Failure, describe
from tierfs.cli.log import logging_to_stderr
from tierfs.cli.output import print_json, printable
from tierfs.errors import InvalidInputError, TierfsError
from tierfs.misplaced import do_not_warn

__all__ = ["COMMANDS", "Command", "build_parser", "load_command", "main"]

COMMANDS = (
    "init",
    "ls",
    "stat",
    "cat",
    "cp",
    "mv",
    "rm",
    "du",
    "verify",
    "status",
    "wait",
    "prefetch",
    "evict",
    "probe",
    "gc",
    "prune",
    "scrub",
    "repair",
    "flusher",
    "checkpoint",
    "mount",
    "umount",
    "demo",
    "version",
)

_DESCRIPTION = "Look at, copy and check what lies in tierfs stores."
_EPILOG = """\
URLs:
  tierfs::s3://bucket/path    a path in the store that holds it, on any filesystem that fsspec knows
  tierfs::file:///data/path   the same on a local disk
  tierfs://NAME/path          a path in a store that the configuration file names
  All commands but cp also take s3://bucket/path or a local path.

Exit codes: 0 done, 1 other error, 2 wrong usage, 3 not found, 4 exists already, 5 conflict, 6 damage,
7 unknown format, 8 object tier failed, 9 no room, 10 not allowed, 11 not in time, 12 gc blocked,
130 interrupted, 141 output closed.
"""


class Command(Protocol):
    """What a command's module offers."""

    NAME: str
    HELP: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it, and return the exit code."""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors like all others, so that ``--json`` holds for them too."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message}; `{self.prog} --help` shows examples")


def load_command(name: str) -> Command:
    """Import one command."""
    return cast("Command", importlib.import_module(f"tierfs.cli.commands.{name}"))


def build_parser(names: Sequence[str] = COMMANDS) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of ``tierfs``, and those of the named commands."""
    top = _Parser(
        prog="tierfs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"tierfs {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name in names:
        command = load_command(name)
        parser = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=f"{command.HELP[:1].upper()}{command.HELP[1:]}.",
            epilog=f"examples:\n{textwrap.indent(command.EXAMPLES.strip(), '  ')}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(parser)
        parsers[name] = parser
    return top, parsers


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: What follows ``tierfs``; by default, this process's arguments.

    Returns:
        The exit code: 0, or that of the category of the error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    do_not_warn()
    if sys.stdout is None:
        # What is opened next would take its number, and what is printed would go there.
        print("tierfs: stdout is closed: send it to /dev/null if it is not wanted", file=sys.stderr)
        return InvalidInputError.exit_code
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal cannot show is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with logging_to_stderr():
            code = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        _drop_stdout()
        return 141
    except KeyboardInterrupt:
        return _report(Failure("interrupted", "interrupted", None, 130), as_json="--json" in words)
    except (TierfsError, OSError) as error:
        return _report(describe(error), as_json="--json" in words)
    return code


def _dispatch(words: list[str]) -> int:
    if not words:
        build_parser()[0].print_help(sys.stderr)
        return InvalidInputError.exit_code
    try:
        if words[0] not in COMMANDS:
            build_parser()[0].parse_args(words)
            raise InvalidInputError("name a command; `tierfs --help` lists them")
        _, parsers = build_parser([words[0]])
        # Options may stand anywhere, also between the arguments.
        arguments = parsers[words[0]].parse_intermixed_args(words[1:])
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    return load_command(words[0]).run(arguments)


def _report(failure: Failure, *, as_json: bool) -> int:
    message = "\n".join(map(printable, failure.message.split("\n")))
    print(f"tierfs: {message}", file=sys.stderr)
    try:
        if as_json:
            print_json({"error": {"kind": failure.kind, "message": failure.message, "path": failure.path}})
        sys.stdout.flush()
    except OSError:
        _drop_stdout()
    return failure.exit_code


def _drop_stdout() -> None:
    """Let the interpreter's own last flush of stdout go nowhere instead of failing."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
