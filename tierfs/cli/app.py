"""Find a command, parse its arguments, run it, and turn errors into exit codes.

A command is a function of a module of `tierfs.cli.commands`, declared with `tierfs.cli.arguments.command`. Only the
module of the requested command is imported. ``tierfs --help`` imports none.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

from tierfs import __version__
from tierfs.cli.arguments import Arguments, Command, add_arguments, loaded
from tierfs.cli.terminal.output import (
    Failure,
    add_json_argument,
    align,
    colored,
    describe,
    logging_to_stderr,
    print_json,
    printable,
)
from tierfs.errors import InvalidInputError, TierfsError

GROUPS = {
    "files": {
        "init": "make a store",
        "ls": "list a directory",
        "stat": "show one file or directory",
        "cat": "write a file to stdout",
        "cp": "copy into a store, out of it, or within it",
        "mv": "move or rename within a store",
        "rm": "delete files and directories",
        "mount": "mount a store as a directory",
        "umount": "unmount a store",
        "serve": "serve a store over S3, WebDAV or SFTP",
        "materialize": "update a local directory from a store",
        "sync": "update a directory in a store from a local one",
    },
    "checkpoints": {
        "checkpoint": "list, show, verify, compare, export and import checkpoints",
        "prune": "delete checkpoints by policy",
    },
    "this host": {
        "status": "show a store's tiers, pending files and errors",
        "wait": "wait until saved files have reached a level",
        "prefetch": "copy files to this host's disk",
        "evict": "drop copies from this host",
        "forget": "remove what this host keeps of a store",
        "flusher": "run, stop or inspect the background flusher",
        "doctor": "check this machine, and advise what to change",
        "ui": "show stores on a web page",
    },
    "upkeep": {
        "du": "show stored, shared and freed bytes",
        "verify": "read everything back, and list damage",
        "gc": "delete bytes that no file needs",
        "scrub": "verify chunks, and heal damaged ones",
        "repair": "repair a store, and list what is lost",
        "probe": "test what an endpoint supports",
    },
    "more": {
        "demo": "train, kill, resume, compare",
        "completion": "print a completion script for a shell",
        "version": "show versions",
    },
}
"""Every command with its line in ``tierfs --help``, grouped by topic."""
ALIASES = {
    "check": "verify",
    "list": "ls",
    "delete": "rm",
    "remove": "rm",
    "copy": "cp",
    "move": "mv",
    "unmount": "umount",
}
"""Names that other tools have for commands. Actions have `ACTION_ALIASES`."""
ACTION_ALIASES = {"list": "ls", "check": "verify"}
_MODULES = {
    "tierfs.cli.commands.listing": ("ls", "stat", "cat", "du"),
    "tierfs.cli.commands.changing": ("cp", "mv", "rm"),
    "tierfs.cli.commands.mounts": ("mount", "umount", "serve"),
    "tierfs.cli.commands.local": ("wait", "prefetch", "evict", "forget"),
    "tierfs.cli.commands.stores": ("init", "probe", "prune", "gc"),
    "tierfs.cli.commands.damage": ("verify", "scrub", "repair"),
    "tierfs.cli.commands.about": ("version", "completion"),
    "tierfs.ui.command": ("ui",),  # in a higher layer: it shows what other commands print
}
"""The commands of each module. Every other command is in the module of its name."""
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}

_DESCRIPTION = """\
usage: tierfs COMMAND [OPTION...] ARGUMENT...

Store, check and convert training checkpoints. `tierfs COMMAND --help` shows a command's options;
`tierfs` alone lists the stores of this host.
"""
_EPILOG = """\
URLs:
  tierfs::s3://bucket/path    a path in a store, on any filesystem that fsspec supports
  tierfs::file:///data/path   the same on a local disk
  tierfs://NAME/path          a path in a store that the configuration file names
  All commands but cp also take s3://bucket/path or a local path.

Exit codes: 0 done, 1 other error, 2 wrong usage, 3 not found, 4 already exists, 5 conflict, 6 damage,
7 unknown format, 8 object tier failed, 9 no room, 10 not allowed, 11 timed out, 12 gc blocked,
130 interrupted, 141 output closed.
"""

_ROWS_MAX = 30
_LITERAL = "\0"  # before a word that begins with - and is no option; no argument of a process contains it


class _Parser(argparse.ArgumentParser):
    """A parser that raises `InvalidInputError` instead of exiting, so that ``--json`` also applies to its errors."""

    def parse_intermixed_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse words of which options may stand between positional arguments, but not after ``--``.

        argparse removes ``--`` in a first pass, and takes words behind it for options in a second one.
        """
        words = list(args or ())
        end = words.index("--") if "--" in words else len(words)
        literal = [_LITERAL + word if word.startswith("-") else word for word in words[end:][1:]]
        arguments = super().parse_intermixed_args([*words[: end + 1], *literal])
        for name, value in vars(arguments).items():
            if isinstance(value, str):
                setattr(arguments, name, value.removeprefix(_LITERAL))
            elif isinstance(value, list):
                setattr(arguments, name, [one.removeprefix(_LITERAL) if isinstance(one, str) else one for one in value])
        return arguments

    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message.replace(_LITERAL, '')}; `{self.prog} --help` shows examples")


class ActionsParser(_Parser):
    """The parser of a command with actions. It finds the action and passes the other words to the action's parser.

    Attributes:
        actions: The parser of each action, by name.
    """

    actions: Mapping[str, argparse.ArgumentParser]

    def parse_intermixed_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse the words after the command. Options may also stand before the action."""
        words = list(args or ())
        action = next((word for word in words if ACTION_ALIASES.get(word, word) in self.actions), None)
        if action is None:
            if {"-h", "--help"} & set(words):
                self.print_help()
                self.exit()
            others = [word for word in words if not word.startswith("-")]
            near = [
                (word, f" (did you mean {one}?)")
                for word in others
                for one in difflib.get_close_matches(word, self.actions, 1)
            ]
            word, meant = (*near, *((word, "") for word in others), ("", ""))[0]
            self.error(f"{word!r} is not an action{meant}" if word else "name an action")
        words.remove(action)
        action = ACTION_ALIASES.get(action, action)
        arguments = self.actions[action].parse_intermixed_args(words)
        arguments.action = action
        return arguments


def load_command(name: str) -> Command:
    """Import a command's module, and return the command."""
    module = next((module for module, names in _MODULES.items() if name in names), f"tierfs.cli.commands.{name}")
    importlib.import_module(module)
    return loaded[name]


def build_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, for the words after its name."""
    command = load_command(name)
    if not command.actions:
        parser = _new_parser(_Parser, f"tierfs {name}", command.line, command.examples)
        _add_arguments(parser, command.arguments)
        return parser
    width = max(map(len, command.actions))
    listed = "\n".join(f"  {action:{width}}  {line}" for action, (line, _) in command.actions.items())
    more = f"\n\nactions:\n{listed}\n\n`tierfs {name} ACTION --help` shows an action's options."
    group = _new_parser(ActionsParser, f"tierfs {name}", command.line, command.examples, more)
    group.usage = f"tierfs {name} ACTION [OPTION...] ARGUMENT..."
    parsers = {}
    for action, (line, arguments) in command.actions.items():
        prog = f"tierfs {name} {action}"
        examples = [one for one in command.examples if one.startswith(f"{prog} ")]
        parsers[action] = _new_parser(_Parser, prog, line, examples)
        _add_arguments(parsers[action], arguments)
    group.actions = parsers
    return group


def _add_arguments(parser: argparse.ArgumentParser, arguments: Sequence[Arguments]) -> None:
    for some in arguments:
        if callable(some):
            some(parser)
        else:
            add_arguments(parser, some)
    if parser.get_default("json") is None:  # the command neither declared it nor is `without_json`
        add_json_argument(parser)


_AParser = TypeVar("_AParser", bound=_Parser)


def _new_parser(kind: type[_AParser], prog: str, line: str, examples: Sequence[str], more: str = "") -> _AParser:
    lines = "\n".join(f"  {example}" for example in examples)
    return kind(
        prog=prog,
        description=f"{line[:1].upper()}{line[1:]}.{more}",
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def help_text() -> str:
    """Return the text of ``tierfs --help``. This imports no command."""
    width = max(map(len, COMMANDS))
    groups = (
        "\n".join([f"{title}:", *(f"    {name:{width}}  {line}" for name, line in group.items())])
        for title, group in GROUPS.items()
    )
    return "\n".join([_DESCRIPTION, *groups, "", _EPILOG])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after ``tierfs``; by default, this process's arguments.

    Returns:
        The command's exit code, or that of the error's category.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:
        # The file takes stderr's descriptor, so that no other file gets it, and the messages of libraries.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays open as long as the process
    if sys.stdout is None:
        # The next file that this process opens would get stdout's descriptor, and the output would go into that file.
        print("tierfs: stdout is closed: redirect it to /dev/null if you do not need it", file=sys.stderr)
        return InvalidInputError.exit_code
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that the terminal cannot show, instead of failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with logging_to_stderr():
            code = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed its end of the pipe.
        _drop_stdout()
        return 141
    except KeyboardInterrupt:
        return _report(Failure("interrupted", "interrupted", None, 130), as_json="--json" in _options(words))
    except (TierfsError, OSError) as error:
        return _report(describe(error), as_json="--json" in _options(words))
    return code


def _options(words: Sequence[str]) -> Sequence[str]:
    """Return the words before ``--``, of which any may be an option."""
    return words[: words.index("--")] if "--" in words else words


def _dispatch(words: list[str]) -> int:
    if not words or words == ["--json"]:
        return _show_stores(as_json=bool(words))
    name, *rest = words
    if name == "help" and rest:
        name, rest = rest[0], [*rest[1:], "--help"]
    name = ALIASES.get(name, name)
    if name in {"-h", "--help", "help"}:
        print(help_text(), end="")
        return 0
    if name in {"--version", "-v", "-V"}:
        print(f"tierfs {__version__}")
        return 0
    if name not in COMMANDS:
        meant = "".join(f" (did you mean {near}?)" for near in difflib.get_close_matches(name, COMMANDS, 1))
        raise InvalidInputError(f"there is no command {name!r}{meant}; `tierfs --help` shows examples")
    try:
        # Options may stand anywhere, also between positional arguments.
        arguments = build_parser(name).parse_intermixed_args(rest)
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else 0
    for value in vars(arguments).values():
        if value == "" or (isinstance(value, list) and "" in value):  # as an unset shell variable makes it
            raise InvalidInputError("an argument is empty: give a URL or a path")
    return load_command(name).run(arguments)


def _show_stores(*, as_json: bool) -> int:
    """Print the stores of this host, pending ones first, and return the exit code."""
    from tierfs.host.host import state_directory  # noqa: PLC0415 - other commands do not need it
    from tierfs.host.local_state import local_stores  # noqa: PLC0415

    state = state_directory()
    stores = local_stores(state)
    if as_json:
        print_json({"state_directory": str(state), "stores": [store._asdict() for store in stores]})
        return 0
    if not stores:
        print(
            "No store has been opened on this host yet. `tierfs init URL` creates one, `tierfs --help` lists the commands."
        )
        return 0
    from tierfs.units import format_bytes  # noqa: PLC0415

    every, stores = stores, [store for store in stores if not store.is_gone or store.is_pending or store.has_flusher]
    rows = [("store", "pending", "flusher", "nvme tier")]
    rows += [
        (
            printable(store.place),
            "yes" if store.is_pending else "-",
            "running" if store.has_flusher else "-",
            format_bytes(store.disk_bytes) if store.disk_bytes else "-",
        )
        for store in stores[:_ROWS_MAX]
    ]
    print("\n".join(align(rows, has_head=True, states=(1, 2))))
    if len(stores) > _ROWS_MAX:
        print(f"... and {len(stores) - _ROWS_MAX} more: `tierfs --json` lists all")
    if len(every) > len(stores):
        size = format_bytes(sum(store.disk_bytes for store in every if store not in stores))
        print(f"{len(every) - len(stores)} more are gone and left {size}: `tierfs forget --gone` removes it")
    print("\n`tierfs status URL` shows one of them, `tierfs --help` lists the commands.")
    return 0


def _report(failure: Failure, *, as_json: bool) -> int:
    message = "\n".join(map(printable, failure.message.split("\n")))
    print(f"{colored('tierfs:', 'problem', sys.stderr)} {message}", file=sys.stderr)
    try:
        if as_json:
            print_json({"error": {"kind": failure.kind, "message": failure.message, "path": failure.path}})
        sys.stdout.flush()
    except OSError:
        _drop_stdout()
    return failure.exit_code


def _drop_stdout() -> None:
    """Point stdout at ``/dev/null``, so that the interpreter's last flush does not fail."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
