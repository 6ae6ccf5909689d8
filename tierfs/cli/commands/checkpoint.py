"""``tierfs checkpoint``: work with checkpoints of torch.distributed.checkpoint.

The actions list, show, verify, compare, export, import and commit checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tierfs.cli.arguments import EXECUTOR, PLACE, Arguments, command, progress_option, require_torch
from tierfs.errors import InvalidInputError

_NAMES = "; RUN/latest, RUN/best and RUN/best:METRIC[:max] name one in RUN"
_ONE = {"url URL": f"the checkpoint's directory{_NAMES}: {PLACE}"}
_RANK = {
    "--rank R:int": "rank to read, if each rank saved on its own (`use_collectives=False`); verify reads all by default"
}
_FORCE = {"--force": "replace existing files; replace a directory only if it holds nothing but a torch checkpoint"}
_ACTIONS: dict[str, tuple[str, Sequence[Arguments]]] = {
    "ls": (
        "list the checkpoints at or below URL",
        [
            {
                "url URL": f"a checkpoint's directory, or one above it: {PLACE}",
                "--limit N:int": "list only the N highest steps",
                "--usage": "show stored and shared bytes, and the bytes that deleting frees; reads the record of every file of the store",
            }
        ],
    ),
    "show": (
        "show the tensors of a checkpoint, where they are, and how they are encoded",
        [
            _ONE,
            {
                "other PATTERN?": "names to show, like '*.weight' (default: all)",
                "--shards": "show each shard's offsets, shape, file, bytes and level, and the tiers that hold it",
                "--codecs": "show how each tensor is encoded in the object tier, and why",
            },
            _RANK,
        ],
    ),
    "verify": (
        "read every byte of a checkpoint, or of all below a directory, and list damaged tensors",
        [{"url URL": f"a checkpoint's directory, or one above it{_NAMES}: {PLACE}"}, _RANK, progress_option],
    ),
    "diff": (
        "compare two checkpoints bit for bit; exit code 1 if they differ",
        [
            _ONE,
            {
                "other OTHER": "the other checkpoint",
                "--top N:int": "list only the N tensors with the largest relative norm",
            },
            _RANK,
            progress_option,
        ],
    ),
    "export": (
        "write a checkpoint as a DCP directory, a safetensors file or a torch.save file",
        [
            _ONE,
            {
                "other TARGET": "a local path or tierfs:: URL",
                "--format {dcp,safetensors,torch}": "format to write (default: by TARGET's name: .safetensors; .pt, .pth and .bin are torch; else dcp)",
                "--skip-objects": "leave out values that are not tensors",
            },
            _FORCE,
            _RANK,
            progress_option,
        ],
    ),
    "import": (
        "save a DCP directory, a safetensors file or a torch.save file as a checkpoint",
        [
            {
                "url SOURCE": "a DCP directory, a safetensors file or a torch.save file, anywhere",
                "other URL": "the checkpoint to create",
            },
            _FORCE,
            _RANK,
            EXECUTOR,
            progress_option,
        ],
    ),
    "commit": (
        "publish a checkpoint when all its parts are in the object tier",
        [
            {
                "url URL": f"the checkpoint's directory: {PLACE}",
                "--timeout SECONDS:float=0": "how long to wait for missing files (default: 0)",
            }
        ],
    ),
}


@command(
    "checkpoint",
    "list, show, verify, compare, export, import and commit checkpoints of torch.distributed.checkpoint",
    """
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
    tierfs checkpoint commit tierfs::s3://bucket/run/step_1000 --timeout 600
    """,
    actions=_ACTIONS,
)
def run_checkpoint(arguments: argparse.Namespace) -> int:
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
