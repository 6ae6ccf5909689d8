"""``tierfs checkpoint ls`` and ``commit``: the commands that read no shard file and load no torch."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Mapping
from typing import cast

from tierfs.checkpoint.catalog import Candidate, Standing, candidates, natural_key, standing
from tierfs.cli.arguments import require_seconds, suggested
from tierfs.cli.files.places import StorePlace, requests_of, store_place
from tierfs.cli.files.transfer import run_in_parallel
from tierfs.cli.terminal.output import align, format_time, print_json, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import CorruptionError, NotFoundError
from tierfs.format.checkpoint import ROOT, SaveMark
from tierfs.format.keys import inside, is_at_or_below
from tierfs.store import Usage, find, stat, usages
from tierfs.store.commit import Commits
from tierfs.store.tree.references import vanished_roots
from tierfs.units import format_bytes


def ls(arguments: argparse.Namespace) -> int:
    """List checkpoints, and return the exit code of damage if one of them is damaged."""
    place = store_place(arguments.url)
    found = candidates(place.store, place.path)
    vanished = {path for path in vanished_roots(place.store) if is_at_or_below(path, place.path)}
    found += [Candidate(path, ()) for path in sorted(vanished - {candidate.directory for candidate in found})]
    if not found and place.entry().is_directory and find(place.store, place.path, detail=False):
        print(f"no checkpoint is in {place.url}: {suggested('ls', '-R', place.url)} lists its files", file=sys.stderr)
    if arguments.limit is not None:
        newest = sorted(found, key=lambda candidate: -1 if candidate.step is None else candidate.step)
        kept = {candidate.directory for candidate in newest[len(newest) - min(len(newest), arguments.limit) :]}
        found = [candidate for candidate in found if candidate.directory in kept]
    listed: dict[str, Standing] = {}

    def look(candidate: Candidate, _stop: threading.Event) -> None:
        listed[candidate.directory] = standing(place.store, candidate)

    with Progress("ls") as progress:
        run_in_parallel(look, found, progress)
        for path in vanished & listed.keys():
            listed[path].damage.append(f"{ROOT} has vanished without a tombstone: copy its record back")
        checkpoints = sorted((listed[candidate.directory] for candidate in found), key=order)
        # Last, because the loop above caches the checkpoints' records.
        held = usages(place.store, [checkpoint.directory for checkpoint in checkpoints]) if arguments.usage else {}
    if arguments.json:
        documents = [list_document(place, checkpoint, held.get(checkpoint.directory)) for checkpoint in checkpoints]
        print_json({"url": place.url, "checkpoints": documents, "requests": requests_of(place.store)})
    elif checkpoints:
        _print_list(place, checkpoints, held, usage=arguments.usage)
    return CorruptionError.exit_code if any(checkpoint.damage for checkpoint in checkpoints) else 0


def order(checkpoint: Standing) -> tuple[object, ...]:
    """Return a sort key: by the directory above, then by step, then by name. Unknown steps come first."""
    above = checkpoint.directory.rpartition("/")[0]
    step = -1 if checkpoint.step is None else checkpoint.step
    return natural_key(above), step, natural_key(checkpoint.directory)


def _name(place: StorePlace, checkpoint: Standing) -> str:
    return place.relative(checkpoint.directory) or place.name


def list_document(place: StorePlace, checkpoint: Standing, held: Usage | None) -> dict[str, object]:
    return {
        "name": _name(place, checkpoint),
        "step": checkpoint.step,
        "state": checkpoint.state,
        "level": None if checkpoint.level is None else checkpoint.level.label,
        "size": checkpoint.length,
        "stored": None if held is None else held.stored_bytes + held.foreign_bytes,
        "new": None if held is None else held.new_bytes,
        "shared": None if held is None else held.shared_bytes,
        "freed": None if held is None else held.freed_bytes,
        "tensors": checkpoint.tensors,
        "objects": checkpoint.objects,
        "files": checkpoint.files,
        "format": checkpoint.format,
        "kind": checkpoint.kind,
        "created": format_time(checkpoint.created_ns, precise=True) if checkpoint.created_ns else None,
        "problems": [*checkpoint.missing, *checkpoint.damage],
        "waiting": checkpoint.waiting,
        "logged_steps": checkpoint.logged,
    }


def _print_list(place: StorePlace, checkpoints: list[Standing], held: Mapping[str, Usage], *, usage: bool) -> None:
    sizes = ("size", "stored", "new", "shared", "freed") if usage else ("size",)
    rows = [("step", "state", "level", *sizes, "tensors", "files", "format", "kind", "created", "name")]
    for checkpoint in checkpoints:
        document = list_document(place, checkpoint, held.get(checkpoint.directory))
        rows.append(
            (
                or_dash(checkpoint.step) + (f" (+{checkpoint.logged} steps)" if checkpoint.logged else ""),
                checkpoint.state,
                "-" if checkpoint.level is None else checkpoint.level.label,
                *("-" if document[name] is None else format_bytes(cast("int", document[name])) for name in sizes),
                or_dash(checkpoint.tensors),
                or_dash(checkpoint.files),
                or_dash(checkpoint.format),
                or_dash(checkpoint.kind),
                format_time(checkpoint.created_ns) if checkpoint.created_ns else "-",
                printable(_name(place, checkpoint)),
            )
        )
    head, *lines = align(rows, right=(0, *range(3, 5 + len(sizes))), has_head=True, states=(1, 2))
    print(head)
    for line, checkpoint in zip(lines, checkpoints, strict=True):
        print(line)
        for problem in (*checkpoint.missing, *checkpoint.damage, *checkpoint.waiting):
            print(f"  {printable(problem)}")


def or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def commit(arguments: argparse.Namespace) -> int:
    """Publish the checkpoint and print its save id. Raise if parts are still missing at the end of the timeout."""
    require_seconds("--timeout", arguments.timeout)
    place = store_place(arguments.url)
    with Progress("commit"):
        Commits(place.store).wait(place.path, arguments.timeout)
    root = inside(place.path, ROOT)
    try:
        manifest = stat(place.store, root).manifest
    except NotFoundError as error:
        raise NotFoundError(
            f"{place.url} is not a checkpoint, and no save to it is announced: {suggested('checkpoint', 'ls', place.url)} lists the checkpoints there",
            path=place.path,
        ) from error
    mark = None if manifest is None else SaveMark.of(manifest.metadata)
    return print_result(
        arguments,
        {"url": place.url, "save_id": mark.save_id if mark is not None else None},
        f"{printable(place.url)} is complete" + (f": save {mark.save_id}" if mark is not None else ""),
    )
