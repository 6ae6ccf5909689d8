"""``tierfs checkpoint verify`` and ``diff``: find damage in a checkpoint, and compare two checkpoints."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tierfs.checkpoint.catalog import candidates
from tierfs.checkpoint.diff import CheckpointDifference, compare
from tierfs.checkpoint.verify import CheckpointReport, verify_checkpoint
from tierfs.cli.commands._checkpoint_places import source_of
from tierfs.cli.files.places import StorePlace
from tierfs.cli.terminal.output import align, print_json, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.errors import CorruptionError
from tierfs.units import format_bytes

DIFFERENT = 1
"""The exit code if checkpoints differ, as in diff(1)."""


def verify(arguments: argparse.Namespace) -> int:
    """Verify, and return the exit code of damage if there is any."""
    source = source_of(arguments.url)
    parts = _parts(source, arguments.rank)
    total = sum(sum(part.files().values()) for part in parts)
    report = CheckpointReport()
    with Progress("verify", total_bytes=total, wanted=arguments.progress) as progress:
        for part in parts:
            report.add(verify_checkpoint(part, progress=progress.advance))
    if arguments.json:
        print_json({"url": source.url, **asdict(report)})
    else:
        _print_report(report, source.url)
    return CorruptionError.exit_code if report.damage else 0


def _parts(source: StorePlace, rank: int | None) -> list[Checkpoint]:
    """Return the checkpoints to verify: one per rank if ranks saved on their own and ``rank`` is None."""
    if rank is None:
        for candidate in candidates(source.store, source.path):
            if candidate.directory == source.path and candidate.ranks:
                return [open_checkpoint(source.store, source.path, rank=rank) for rank in candidate.ranks]
    return [open_checkpoint(source.store, source.path, rank=rank)]


def _print_report(report: CheckpointReport, url: str) -> None:
    for damage in report.damage:
        print(f"damaged  {', '.join(map(printable, damage.names)) or '-'}")
        span = f", bytes {damage.at} to {damage.at + damage.length}" if damage.length else ""
        print(f"  file     {printable(damage.file) or '-'}{span}, {damage.tier} tier")
        print(f"  kind     {damage.kind}")
        print(f"  problem  {printable(damage.problem)}")
    if report.undigested:
        print(
            f"files without digests, because tierfs did not write them: {', '.join(map(printable, report.undigested))}"
        )
    checked = (
        f"{report.tensors} tensors and {report.objects} objects in {report.files} files, {format_bytes(report.length)}"
    )
    print(f"checked {checked} of {printable(url)}: {f'{len(report.damage)} damaged' if report.damage else 'all sound'}")


def diff(arguments: argparse.Namespace) -> int:
    """Compare, and return 1 if the checkpoints differ."""
    sources = source_of(arguments.url), source_of(arguments.other)
    a, b = (open_checkpoint(source.store, source.path, rank=arguments.rank) for source in sources)
    with Progress("diff", total_bytes=a.length, wanted=arguments.progress) as progress:
        found = compare(a, b, progress=progress.advance)
    if arguments.json:
        print_json(_document(found, *sources))
    else:
        _print_difference(found, *sources)
    return 0 if found.is_none else DIFFERENT


def _document(found: CheckpointDifference, a: StorePlace, b: StorePlace) -> dict[str, object]:
    return {
        "a": a.url,
        "b": b.url,
        "equal": found.is_none,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "unlike": [{"name": fqn, "a": one, "b": other} for fqn, (one, other) in found.unlike.items()],
        "tensors": [
            {"name": fqn, **asdict(difference), "fraction": difference.fraction}
            for fqn, difference in found.tensors.items()
        ],
        "objects": found.objects,
        "equal_count": found.equal,
    }


def _print_difference(found: CheckpointDifference, a: StorePlace, b: StorePlace) -> None:
    for fqn in found.only_a:
        print(f"only in A  {printable(fqn)}")
    for fqn in found.only_b:
        print(f"only in B  {printable(fqn)}")
    for fqn, (one, other) in found.unlike.items():
        print(f"unlike     {printable(fqn)}: {one} in A, {other} in B")
    rows = [("max abs", "differing", "of", "not finite", "name")]
    for fqn, difference in found.tensors.items():
        apart = "-" if difference.max_abs is None else f"{difference.max_abs:.6g}"
        share = f"{difference.fraction:.3%}"
        rows.append((apart, share, str(difference.elements), str(difference.not_finite or "-"), printable(fqn)))
    if found.tensors:
        head, *lines = align(rows, right=(0, 1, 2, 3), has_head=True)
        print(f"           {head}", *(f"differs    {line}" for line in lines), sep="\n")
    for fqn in found.objects:
        print(f"differs    {printable(fqn)} (object)")
    count = len(found.only_a) + len(found.only_b) + len(found.unlike) + len(found.tensors) + len(found.objects)
    print(f"{found.equal} equal, {count} different: A is {printable(a.url)}, B is {printable(b.url)}")
