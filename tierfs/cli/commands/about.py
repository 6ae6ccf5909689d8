"""``tierfs version`` and ``completion``: describe the program itself."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from tierfs import __version__, kernels
from tierfs.cli.arguments import command, without_json
from tierfs.cli.terminal.output import align, print_result
from tierfs.format.header import VERSION


@command(
    "version",
    "show the versions of tierfs, the store format and the packages that tierfs uses",
    """
    tierfs version
    tierfs version --json
    """,
)
def run_version(arguments: argparse.Namespace) -> int:
    versions = {
        "tierfs": __version__,
        "format": VERSION,
        "python": platform.python_version(),
        "fsspec": installed_version("fsspec"),
        "torch": installed_version("torch"),
        "kernels": kernels.status(),
    }
    rows = [(name, "not installed" if version is None else str(version)) for name, version in versions.items()]
    return print_result(arguments, versions, *align(rows))


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_Words: TypeAlias = Mapping[str, Mapping[str, list[str]]]
"""The options by command and action. The action of a command without actions is an empty string."""

_BASH = """\
_tierfs() {
    local current=${COMP_WORDS[COMP_CWORD]} words="" options=""
    case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
%s
    esac
    [[ $current == -* ]] && words=$options
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _tierfs tierfs
"""
_ZSH_FIRST = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


@command(
    "completion",
    "print a script that completes commands, actions and options in a shell",
    """
    tierfs completion bash > ~/.local/share/bash-completion/completions/tierfs
    tierfs completion zsh >> ~/.zshrc
    tierfs completion fish > ~/.config/fish/completions/tierfs.fish
    """,
    {"shell {bash,zsh,fish}": "shell to print the script for"},
    without_json,
)
def run_completion(arguments: argparse.Namespace) -> int:
    words = _vocabulary()
    if arguments.shell == "fish":
        print("\n".join(_fish(words)))
    else:
        print((_ZSH_FIRST if arguments.shell == "zsh" else "") + _BASH % "\n".join(_cases(words)), end="")
    return 0


def _vocabulary() -> _Words:
    """Collect the words from the parsers of all commands, which are imported for it."""
    from tierfs.cli.app import COMMANDS, ActionsParser, build_parser  # noqa: PLC0415 - it imports this module

    words = {}
    for name in COMMANDS:
        parser = build_parser(name)
        actions = parser.actions if isinstance(parser, ActionsParser) else {"": parser}
        words[name] = {
            action: [option for option in one._option_string_actions if option.startswith("--")]
            for action, one in actions.items()
        }
    return words


def _cases(words: _Words) -> Iterator[str]:
    yield f'        "1 "*) words="{" ".join(words)}"; options="--help --version" ;;'
    for name, actions in words.items():
        if list(actions) != [""]:
            yield f'        "2 {name} "*) words="{" ".join(actions)}"; options="--help" ;;'
        for action, options in actions.items():
            pattern = f'*" {name} {action}"' if action else f'*" {name} "*'
            yield f'        {pattern}) options="{" ".join(options)}" ;;'


def _fish(words: _Words) -> Iterator[str]:
    from tierfs.cli.app import COMMANDS  # noqa: PLC0415 - see above

    for name, line in COMMANDS.items():
        yield f"complete -c tierfs -n __fish_use_subcommand -f -a {name} -d {_quoted(line)}"
    for name, actions in words.items():
        seen = f"__fish_seen_subcommand_from {name}"
        if list(actions) != [""]:
            every = " ".join(actions)
            yield f"complete -c tierfs -n '{seen}; and not __fish_seen_subcommand_from {every}' -f -a '{every}'"
        for action, options in actions.items():
            where = f"{seen}; and __fish_seen_subcommand_from {action}" if action else seen
            yield from (f"complete -c tierfs -n '{where}' -l {option.removeprefix('--')}" for option in options)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
