"""``tierfs prune``: remove checkpoints by policy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.files.places import named_path, store_place
from tierfs.cli.terminal.output import add_json_argument, align, print_json, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import ConflictError, InvalidInputError

if TYPE_CHECKING:
    from tierfs.checkpoint.retention import Decision

HELP = "remove checkpoints that no rule keeps"
EXAMPLES = """\
tierfs prune s3://bucket/run --keep latest:3 --keep every:10000 --dry-run
tierfs prune s3://bucket/run --keep latest:3 --keep best:2:val_loss --keep within:2d"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="RULE",
        help="`latest:N`, `every:STEPS`, `best:K:METRIC[:max]`, `within:2d` or `geometric[:BASE]`; a checkpoint is kept if any rule keeps it",
    )
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME",
        help="name or URL of a checkpoint below URL to keep; may be given several times",
    )
    parser.add_argument("--dry-run", action="store_true", help="remove nothing; show which rules keep each checkpoint")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Remove the checkpoints that no rule keeps. Return the exit code of a conflict if one of them was saved again."""
    from tierfs.checkpoint.prune import prune  # noqa: PLC0415 - --help does not need it
    from tierfs.checkpoint.retention import parse_rule  # noqa: PLC0415

    if not arguments.keep:
        raise InvalidInputError("name at least one rule, like --keep latest:3")
    keep = [parse_rule(text) for text in arguments.keep]
    place = store_place(arguments.url)
    pinned = {named_path(place, text) for text in arguments.pin}
    with Progress("prune"):
        pruned = prune(place.store, place.path, keep, pinned=pinned, dry_run=arguments.dry_run)
    if arguments.json:
        print_json({"url": place.url, "dry_run": arguments.dry_run, "checkpoints": [_plain(each) for each in pruned]})
    else:
        _print(pruned, dry_run=arguments.dry_run)
    return ConflictError.exit_code if any(each.problem for each in pruned) else 0


def _plain(each: Decision) -> dict[str, object]:
    saved = each.saved
    return {
        "path": saved.path,
        "step": saved.step,
        "kind": saved.kind,
        "kept": each.is_kept,
        "reasons": list(each.reasons),
        "removed": each.removed,
        "problem": each.problem,
    }


def _print(pruned: list[Decision], *, dry_run: bool) -> None:
    if not pruned:
        print("there are no checkpoints")
        return
    rows = []
    for each in pruned:
        saved = each.saved
        what = "kept" if each.is_kept else "removed" if each.removed else "would go" if dry_run else "failed"
        why = each.problem or ", ".join(each.reasons) or "no rule keeps it"
        rows.append((what, "-" if saved.step is None else str(saved.step), printable(saved.path), printable(why)))
    print("\n".join(align(rows, right=(1,), states=(0,))))
