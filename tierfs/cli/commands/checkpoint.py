"""``tierfs checkpoint``: work with checkpoints of torch.distributed.checkpoint.

The actions list, show, verify, compare, export, import and commit checkpoints.
"""

from __future__ import annotations

import argparse
from typing import Any

from tierfs.cli.arguments import PLACE, add_options, require_torch
from tierfs.cli.executors import add_executor_argument
from tierfs.cli.terminal.progress import add_progress_argument
from tierfs.errors import InvalidInputError

HELP = "list, show, verify, compare, export, import and commit checkpoints of torch.distributed.checkpoint"
EXAMPLES = """\
tierfs checkpoint ls tierfs::s3://bucket/run
tierfs checkpoint ls tierfs::s3://bucket/run --usage
tierfs checkpoint show tierfs::s3://bucket/run/step_1000 '*.weight' --shards
tierfs checkpoint verify tierfs::s3://bucket/run/step_1000
tierfs checkpoint verify tierfs::s3://bucket/run
tierfs checkpoint diff tierfs::s3://bucket/run/step_1000 tierfs::s3://bucket/run/latest --top 10
tierfs checkpoint export tierfs::s3://bucket/run/step_1000 model.safetensors --skip-objects
tierfs checkpoint export tierfs::s3://bucket/run/step_1000 /data/step_1000 --format dcp
tierfs checkpoint import /data/step_1000 tierfs::s3://bucket/run/step_1000
tierfs checkpoint import s3://bucket/old/step_1000 tierfs::s3://bucket/run/step_1000
tierfs checkpoint commit tierfs::s3://bucket/run/step_1000 --timeout 600"""


ACTIONS = {
    "ls": "list the checkpoints at or below URL",
    "show": "show the tensors of a checkpoint, where they are, and how they are encoded",
    "verify": "read every byte of a checkpoint, or of all below a directory, and list damaged tensors",
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
_NAMES = "; RUN/latest, RUN/best and RUN/best:METRIC[:max] name one in RUN"
_FIRST = {
    "ls": f"a checkpoint's directory, or one above it: {PLACE}",
    "verify": f"a checkpoint's directory, or one above it{_NAMES}: {PLACE}",
    "import": "a DCP directory, a safetensors file or a torch.save file, anywhere",
    "commit": f"the checkpoint's directory: {PLACE}",
}
# The actions that have an option, and its help text, by its usage.
_OPTIONS = {
    "--limit N:int": ({"ls"}, "list only the N highest steps"),
    "--usage": (
        {"ls"},
        "show stored and shared bytes, and the bytes that deleting frees; reads the record of every file of the store",
    ),
    "--shards": ({"show"}, "show each shard's offsets, shape, file, bytes and level, and the tiers that hold it"),
    "--codecs": ({"show"}, "show how each tensor is encoded in the object tier, and why"),
    "--top N:int": ({"diff"}, "list only the N tensors with the largest relative norm"),
    "--format {dcp,safetensors,torch}": (
        {"export"},
        "format to write (default: by TARGET's name: .safetensors; .pt, .pth and .bin are torch; else dcp)",
    ),
    "--skip-objects": ({"export"}, "leave out values that are not tensors"),
    "--force": (
        {"export", "import"},
        "replace existing files; replace a directory only if it holds nothing but a torch checkpoint",
    ),
    "--rank R:int": (
        set(ACTIONS) - {"ls", "commit"},
        "rank to read, if each rank saved on its own (`use_collectives=False`); verify reads all by default",
    ),
    "--timeout SECONDS:float=0": ({"commit"}, "how long to wait for missing files (default: 0)"),
}


def add_action_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    first = _FIRST.get(action, f"the checkpoint's directory{_NAMES}: {PLACE}")
    parser.add_argument("url", metavar="SOURCE" if action == "import" else "URL", help=first)
    if action in _SECOND:
        metavar, described = _SECOND[action]
        parser.add_argument("other", metavar=metavar, nargs="?" if action == "show" else None, help=described)
    add_options(parser, {usage: text for usage, (actions, text) in _OPTIONS.items() if action in actions})
    if action == "import":
        add_executor_argument(parser)
    if action in {"verify", "diff", "export", "import"}:
        add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    for name in ("limit", "rank", "top"):
        value = getattr(arguments, name, None)
        if value is not None and value < 0:
            raise InvalidInputError(f"--{name} {value}: give a number that is at least 0")
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
