"""``tierfs prune``: remove checkpoints by policy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierfs.cli.arguments import add_options, add_url_argument
from tierfs.cli.files.places import named_path, store_place
from tierfs.cli.terminal.output import align, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import ConflictError, InvalidInputError

if TYPE_CHECKING:
    from tierfs.checkpoint.retention import Decision

HELP = "remove checkpoints that no rule keeps"
EXAMPLES = """\
tierfs prune s3://bucket/run --keep latest:3 --keep every:10000 --dry-run
tierfs prune s3://bucket/run --keep latest:3 --keep best:2:val_loss --keep within:2d"""


_OPTIONS = {
    "--keep RULE...": "`latest:N`, `every:STEPS`, `best:K:METRIC[:max]`, `within:2d` or `geometric[:BASE]`; a checkpoint is kept if any rule keeps it",
    "--pin NAME...": "name or URL of a checkpoint below URL to keep; may be given several times",
    "--dry-run": "remove nothing; show which rules keep each checkpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_options(parser, _OPTIONS)


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
    document = {
        "url": place.url,
        "dry_run": arguments.dry_run,
        "checkpoints": [decision_document(each) for each in pruned],
    }
    code = ConflictError.exit_code if any(each.problem for each in pruned) else 0
    return print_result(arguments, document, *_lines(pruned, dry_run=arguments.dry_run), code=code)


def decision_document(each: Decision) -> dict[str, object]:
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


def _lines(pruned: list[Decision], *, dry_run: bool) -> list[str]:
    rows = []
    for each in pruned:
        saved = each.saved
        what = "kept" if each.is_kept else "removed" if each.removed else "would go" if dry_run else "failed"
        why = each.problem or ", ".join(each.reasons) or "no rule keeps it"
        rows.append((what, "-" if saved.step is None else str(saved.step), printable(saved.path), printable(why)))
    return align(rows, right=(1,), states=(0,)) or ["there are no checkpoints"]
