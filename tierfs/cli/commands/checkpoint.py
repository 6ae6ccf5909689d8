"""``tierfs checkpoint``: work with checkpoints of torch.distributed.checkpoint.

The actions list, show, verify, compare, export, import and commit checkpoints.
"""

from __future__ import annotations

import argparse
from typing import Any

from tierfs.cli.arguments import PLACE, require_torch, require_url
from tierfs.cli.executors import add_executor_argument
from tierfs.cli.terminal.output import add_json_argument
from tierfs.cli.terminal.progress import add_progress_argument
from tierfs.errors import InvalidInputError

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
tierfs checkpoint import s3://bucket/old/step_1000 tierfs::s3://bucket/run/step_1000
tierfs checkpoint commit tierfs::s3://bucket/run/step_1000 --timeout 600"""


ACTIONS = {
    "ls": "list the checkpoints at or below URL",
    "show": "show the tensors of a checkpoint, where they are, and how they are encoded",
    "verify": "read every byte of a checkpoint, and list damaged tensors",
    "diff": "compare two checkpoints bit for bit; exit code 1 if they differ",
    "export": "write a checkpoint as a DCP directory, a safetensors file or a torch.save file",
    "import": "save a DCP directory, a safetensors file or a torch.save file as a checkpoint",
    "commit": "publish a checkpoint when all its parts are in the object tier",
}
_SECOND = {
    "show": ("PATTERN", "names to show, like '*.weight' (default: all)"),
    "diff": ("OTHER", "the other checkpoint"),
    "export": ("TARGET", "a local path or tierfs:: URL"),
    "import": ("URL", "the checkpoint to create"),
}


def add_action_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    if action == "import":
        parser.add_argument(
            "url", metavar="SOURCE", help="a DCP directory, a safetensors file or a torch.save file, anywhere"
        )
    else:
        below = ", or a directory above it" if action == "ls" else ""
        parser.add_argument("url", metavar="URL", help=f"the checkpoint's directory{below}: {PLACE}")
    metavar, described = _SECOND.get(action, ("nothing", argparse.SUPPRESS))
    if action in {"diff", "export", "import"}:
        parser.add_argument("other", metavar=metavar, help=described)
    else:
        parser.add_argument("other", metavar=metavar, nargs="?", help=described)
    if action == "ls":
        parser.add_argument("--limit", type=int, metavar="N", help="list only the N highest steps")
        parser.add_argument(
            "--usage",
            action="store_true",
            help="show stored and shared bytes, and the bytes that deleting frees; reads the record of every file of the store",
        )
    if action == "show":
        parser.add_argument(
            "--shards",
            action="store_true",
            help="show each shard's offsets, shape, file, bytes and level, and the tiers that hold it",
        )
        parser.add_argument(
            "--codecs", action="store_true", help="show how each tensor is encoded in the object tier, and why"
        )
    if action == "export":
        parser.add_argument(
            "--format",
            choices=["dcp", "safetensors", "torch"],
            help="format to write (default: by TARGET's name: .safetensors, .pt and .pth, else dcp)",
        )
        parser.add_argument("--skip-objects", action="store_true", help="leave out values that are not tensors")
    if action in {"export", "import"}:
        parser.add_argument(
            "--force",
            action="store_true",
            help="replace existing files; replace a directory only if it holds nothing but a torch checkpoint",
        )
    if action == "import":
        add_executor_argument(parser)
    if action not in {"ls", "commit"}:
        parser.add_argument(
            "--rank",
            type=int,
            metavar="R",
            help="rank to read, if each rank saved on its own (`use_collectives=False`); verify reads all by default",
        )
    if action in {"verify", "diff", "export", "import"}:
        add_progress_argument(parser)
    if action == "commit":
        parser.add_argument(
            "--timeout", type=float, metavar="SECONDS", help="how long to wait for missing files (default: 0)"
        )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    actions: Any
    if arguments.action in {"ls", "commit"}:
        from tierfs.cli.commands import _checkpoint_catalog as actions  # noqa: PLC0415 - --help does not need it
    else:
        # These modules load torch, which takes seconds, so they are imported after all checks.
        require_torch("checkpoints are read")
        if arguments.action in {"export", "import"}:
            from tierfs.cli.commands import _checkpoint_exchange as actions  # noqa: PLC0415
        else:
            from tierfs.cli.commands import _checkpoint_content as actions  # noqa: PLC0415
    code: int = getattr(actions, arguments.action.replace("import", "import_"))(arguments)
    return code


def _check(arguments: argparse.Namespace) -> None:
    action, other = arguments.action, arguments.other
    require_url(arguments.url)
    if other is not None:
        require_url(other)
    if action not in _SECOND and other is not None:
        raise InvalidInputError(f"`tierfs checkpoint {action}` takes only a URL, but got {other!r} too")
    for name in ("limit", "rank"):
        value = getattr(arguments, name, None)
        if value is not None and value < 0:
            raise InvalidInputError(f"--{name} {value}: give a number that is at least 0")
