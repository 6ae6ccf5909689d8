"""``tierfs checkpoint``: list, show, check, compare, export, import and commit checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass

from tierfs.cli.output import add_json_argument
from tierfs.cli.progress import add_progress_argument
from tierfs.errors import InvalidInputError

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "checkpoint"
HELP = "list, show, verify, compare, export, import and commit checkpoints of torch.distributed.checkpoint"
EXAMPLES = """\
tierfs checkpoint ls tierfs::s3://bucket/run
tierfs checkpoint ls tierfs::s3://bucket/run --usage
tierfs checkpoint show tierfs::s3://bucket/run/step_1000 '*.weight' --shards
tierfs checkpoint verify tierfs::s3://bucket/run/step_1000
tierfs checkpoint diff tierfs::s3://bucket/run/step_1000 tierfs::s3://bucket/run/step_2000
tierfs checkpoint export tierfs::s3://bucket/run/step_1000 model.safetensors --skip-objects
tierfs checkpoint export tierfs::s3://bucket/run/step_1000 /data/step_1000 --format dcp
tierfs checkpoint import /data/step_1000 tierfs::s3://bucket/run/step_1000
tierfs checkpoint commit tierfs::s3://bucket/run/step_1000 --timeout 600"""


@dataclass(frozen=True, slots=True)
class _Action:
    """What an action takes beside URL.

    Attributes:
        other: What the second argument is; empty for none.
        is_needed: Whether it has to be given.
        options: Of those that not all actions have.
    """

    other: str
    is_needed: bool
    options: frozenset[str]


_ACTIONS = {
    "ls": _Action("", is_needed=False, options=frozenset({"limit", "usage"})),
    "show": _Action("PATTERN", is_needed=False, options=frozenset({"shards", "codecs", "rank"})),
    "verify": _Action("", is_needed=False, options=frozenset({"rank", "progress"})),
    "diff": _Action("OTHER", is_needed=True, options=frozenset({"rank", "progress"})),
    "export": _Action(
        "TARGET", is_needed=True, options=frozenset({"format", "skip_objects", "force", "rank", "progress"})
    ),
    "import": _Action("URL", is_needed=True, options=frozenset({"force", "rank", "progress"})),
    "commit": _Action("", is_needed=False, options=frozenset({"timeout"})),
}
_OPTIONS = {
    "limit": None,
    "usage": False,
    "shards": False,
    "codecs": False,
    "format": None,
    "skip_objects": False,
    "force": False,
    "rank": None,
    "progress": None,
    "timeout": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=list(_ACTIONS), help="what to do")
    parser.add_argument(
        "url",
        metavar="URL",
        help="the checkpoint's directory, for ls one above: tierfs:: URL, URL of the object tier, or local path; for import "
        "SOURCE: a DCP directory, a safetensors file or one of torch.save, anywhere",
    )
    parser.add_argument(
        "other",
        metavar="OTHER",
        nargs="?",
        help="for show: PATTERN of the names to show, like '*.weight'; for diff: the other checkpoint; for export: TARGET, a "
        "local path or tierfs:: URL; for import: URL of the checkpoint to make",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="for ls: only the N of the highest steps")
    parser.add_argument(
        "--usage",
        action="store_true",
        help="for ls: how many bytes are shared with something else in the store, and how many deleting would free",
    )
    parser.add_argument("--shards", action="store_true", help="for show: where each shard of a tensor lies")
    parser.add_argument(
        "--codecs", action="store_true", help="for show: how each tensor is encoded in the object tier, and why"
    )
    parser.add_argument(
        "--format",
        choices=["dcp", "safetensors", "torch"],
        help="for export: what to make of it (default: by TARGET's name: .safetensors, .pt, .pth, else dcp)",
    )
    parser.add_argument("--skip-objects", action="store_true", help="for export: leave out what is no tensor")
    parser.add_argument("--force", action="store_true", help="for export and import: replace what is there")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="where ranks saved on their own (use_collectives=False): which one is meant",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="for commit: wait so long for files that are missing (default: 0)",
    )
    add_progress_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do what the action says."""
    _check(arguments)
    if arguments.action == "commit":
        from tierfs.cli.commands._checkpoint_commit import commit  # noqa: PLC0415 - not for --help

        return commit(arguments)
    if importlib.util.find_spec("torch") is None:
        raise InvalidInputError("checkpoints are read with torch, which is not installed: pip install 'tierfs[torch]'")
    # Each of them loads torch, which takes seconds: only when it is sure to be needed.
    if arguments.action in {"ls", "show"}:
        from tierfs.cli.commands import _checkpoint_look as look  # noqa: PLC0415

        return look.ls(arguments) if arguments.action == "ls" else look.show(arguments)
    if arguments.action in {"verify", "diff"}:
        from tierfs.cli.commands import _checkpoint_check as check  # noqa: PLC0415

        return check.verify(arguments) if arguments.action == "verify" else check.diff(arguments)
    from tierfs.cli.commands import _checkpoint_exchange as exchange  # noqa: PLC0415

    return exchange.export(arguments) if arguments.action == "export" else exchange.import_(arguments)


def _check(arguments: argparse.Namespace) -> None:
    action = _ACTIONS[arguments.action]
    if not arguments.url or arguments.other == "":
        raise InvalidInputError("an argument is empty: give a URL or a path")
    if action.is_needed and arguments.other is None:
        raise InvalidInputError(
            f"`tierfs checkpoint {arguments.action}` takes two arguments: the second one is {action.other}"
        )
    if not action.other and arguments.other is not None:
        raise InvalidInputError(
            f"`tierfs checkpoint {arguments.action}` takes one URL, and nothing else: {arguments.other!r}"
        )
    for name, default in _OPTIONS.items():
        if name not in action.options and getattr(arguments, name) != default:
            raise InvalidInputError(f"--{name.replace('_', '-')} is not for `tierfs checkpoint {arguments.action}`")
    for name in ("limit", "rank"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            raise InvalidInputError(f"--{name} {value}: give a number from 0 on")
