"""``tierfs init``, ``probe``, ``prune`` and ``gc``: make a store, test its endpoint, and delete what nothing keeps."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from tierfs.cli.arguments import URL, command, progress_option, suggested
from tierfs.cli.files.places import find_store, named_path, store_place, whole_store
from tierfs.cli.terminal.output import align, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import ConflictError, InvalidInputError, ReadOnlyError
from tierfs.session import init, parse_url
from tierfs.session.descriptor import probe_store
from tierfs.units import format_bytes

if TYPE_CHECKING:
    from tierfs.checkpoint.retention import Decision
    from tierfs.format.descriptor import Capabilities
    from tierfs.objects.probe import Findings
    from tierfs.store import Store
    from tierfs.store.maintenance.gc import GcReport, Tally

BLOCKED_EXIT_CODE = 12


@command(
    "init",
    "make a store at a URL, or find the existing one",
    """
    tierfs init s3://bucket/run
    tierfs init /data/checkpoints
    tierfs init tierfs://NAME --digest blake3
    """,
    URL,
    {
        "--digest {xxh3-128,blake3}=xxh3-128": "digest that names contents (default: %(default)s); blake3 is for writers that are not trusted, and needs tierfs[fast]; cannot be changed later",
        "--lease SECONDS:int": "duration of a writer's lease (default: 60); cannot be changed later",
        "--grace SECONDS:int": "how long replaced or deleted bytes stay readable, and gc waits (default: an hour, or six leases); cannot be changed later",
    },
)
def run_init(arguments: argparse.Namespace) -> int:
    try:
        found = find_store(arguments.url)
    except ReadOnlyError:
        # The search looked above the URL and was refused. The store may still be created at the URL itself.
        found = None
    with Progress("init"):
        store = init(arguments.url, digest=arguments.digest, lease_s=arguments.lease, grace_s=arguments.grace)
    descriptor = store.descriptor
    made = found is None
    document = {
        "url": store.url,
        "made": made,
        "uuid": descriptor.uuid,
        "digest": descriptor.digest_kind.label,
        "single_writer": descriptor.single_writer,
        "cannot_promise": descriptor.endpoint.missing,
        "host_local": descriptor.endpoint.host_local,
    }
    rows = [
        ("made" if made else "found", store.url),
        ("uuid", descriptor.uuid),
        ("digest", descriptor.digest_kind.label),
        ("endpoint lacks", ", ".join(descriptor.endpoint.missing) or "nothing"),
        ("writers", "one process at a time" if descriptor.single_writer else "any number"),
    ]
    if descriptor.endpoint.host_local:
        rows.append(("place", "this host: the store is lost with it"))
    return print_result(arguments, document, *align(rows))


@command(
    "probe",
    "test which conditions and checksums an endpoint supports, and record the result in its store",
    """
    tierfs probe s3://bucket/run
    tierfs probe tierfs://NAME --json
    """,
    URL,
)
def run_probe(arguments: argparse.Namespace) -> int:
    with Progress("probe"):
        url, found, before = probe_store(parse_url(arguments.url))
    endpoint = found.capabilities
    document = {
        "url": url,
        "has_store": before is not None,
        "noted": before not in (None, endpoint),
        "single_writer": endpoint.single_writer,
        "cannot_promise": endpoint.missing,
        "checksums": list(endpoint.checksums),
        "tests": [asdict(test) for test in found.tests],
    }
    return print_result(arguments, document, *_probe_lines(url, found, before))


def _probe_lines(url: str, found: Findings, before: Capabilities | None) -> Iterator[str]:
    rows = [("kept" if test.kept else "not kept", test.name, test.detail) for test in found.tests]
    yield from align(rows, states=(0,))
    endpoint = found.capabilities
    yield f"writers   {'one process at a time' if endpoint.single_writer else 'any number'}"
    if not endpoint.host_local:
        yield f"writes    {f'verified by the server, {endpoint.checksums[0]}' if endpoint.checksums else 'read back'}"
    if before is None:
        yield f"store     none at {url}: make one with: tierfs init {shlex.quote(url)}"
    elif before == endpoint:
        yield f"store     {url}, with the same result recorded"
    else:
        yield (
            f"store     {url}, with the new result recorded; processes that have it open use the result after they reopen it"
        )


@command(
    "gc",
    "delete objects that nothing in a store needs",
    """
    tierfs gc s3://bucket/run --dry-run
    tierfs gc s3://bucket/run
    tierfs gc /data/checkpoints --wait
    tierfs gc /data/checkpoints --exclusive
    """,
    URL,
    {
        "--dry-run": "change nothing; print what would be done, by reason",
        "--wait": "wait until the objects that this run condemns may be deleted, and delete them (default: the next run does)",
        "--exclusive": "delete at once, if no other process writes; refused if a writer has a live lease",
        "--reencode": "first encode chunks that were sent raw under pressure; gc deletes the raw ones later",
        "--without ROOT...": "a path in the store, or its URL, below which unreadable and vanished records are ignored; needs --yes; may be given several times",
        "--yes": "confirm --without: chunks that those files need may be deleted",
        "--concurrency N:int=16": "requests at once (default: 16)",
        "--rate N:float=3000": "most objects deleted per second (default: 3000)",
    },
    progress_option,
)
def run_gc(arguments: argparse.Namespace) -> int:
    """Collect garbage, and return the exit code of a blocked gc if a record cannot be read or has vanished."""
    from tierfs.store.maintenance.gc import GcOptions, collect  # noqa: PLC0415 - it loads NumPy

    if arguments.without and not arguments.yes:
        raise InvalidInputError(
            "--without may delete data that unreadable or vanished files need: check these files first, then add --yes"
        )
    if arguments.concurrency < 1 or not arguments.rate > 0:
        raise InvalidInputError("--concurrency must be at least 1 and --rate more than 0")
    if arguments.wait and arguments.dry_run:
        raise InvalidInputError("--wait and --dry-run exclude each other")
    store = whole_store(arguments.url, "gc")
    root = store_place(arguments.url)
    without = tuple(named_path(root, text) for text in arguments.without)
    if "" in without:
        raise InvalidInputError("--without names the whole store: name the paths that cannot be read")
    options = GcOptions(
        dry_run=arguments.dry_run,
        exclusive=arguments.exclusive,
        reencode=arguments.reencode,
        without=without,
        concurrency=arguments.concurrency,
        deletes_per_s=arguments.rate,
    )
    reports = []
    with Progress("gc", wanted=arguments.progress) as progress:
        counts: dict[str, int] = {}

        def note(what: str, count: int) -> None:
            counts[what] = counts.get(what, 0) + count
            progress.note(", ".join(f"{number} {word}" for word, number in counts.items()))

        reports.append(collect(store, options, note))
        if arguments.wait and not reports[0].is_blocked and reports[0].next_s is not None:
            store.clock.sleep(reports[0].next_s)
            reports.append(collect(store, options, note))
    document = {"url": store.url, "runs": [report.as_dict() for report in reports]}
    lines = [line for report in reports for line in _gc_lines(report, store)]
    code = BLOCKED_EXIT_CODE if any(report.is_blocked for report in reports) else 0
    return print_result(arguments, document, *lines, code=code)


def _gc_lines(report: GcReport, store: Store) -> Iterator[str]:
    from tierfs.store.maintenance.gc.record_losses import VANISHED  # noqa: PLC0415 - it loads NumPy

    for each in report.unreadable:
        yield f"{'vanished' if each.kind == VANISHED else 'unreadable'}  {printable(each.path or each.key)}"
        yield f"  key      {printable(each.key)}"
        yield f"  problem  {printable(each.problem)}"
    if report.is_blocked:
        yield (
            f"nothing was condemned or deleted: {len(report.unreadable)} records cannot be read or have vanished, so gc does not know "
            f"what they need. Restore or delete them, or ignore them: {suggested('gc', store.url, '--without', 'PATH', '--yes')}"
        )
        return
    would = "would be " if report.dry_run else ""
    rows: list[tuple[str, Tally, str]] = [
        (f"{would}re-encoded", report.reencoded, "sent raw under pressure"),
        (f"{would}deleted", report.deleted, "condemned a grace ago, and still needed by nothing"),
        (f"{would}condemned", report.condemned, "needed by nothing"),
        ("waiting", report.waiting, "condemned, until a grace has passed"),
        ("young", report.young, "needed by nothing, and younger than a grace"),
        ("kept", report.reached, f"needed by {report.files} files"),
        (f"{would}deleted", report.replaced, "shard files that no save has named for a grace"),
        (
            "kept",
            report.unfinished,
            "shard files that no checkpoint names: of saves under way, unfinished or just replaced",
        ),
        (f"{would}tidied", report.tombstones, "tombstones"),
        (f"{would}tidied", report.leases, "expired leases"),
        (f"{would}tidied", report.probes, "probes"),
        (f"{would}tidied", report.references, "reference lists of deleted checkpoints"),
    ]
    shown = [(what, tally, why) for what, tally, why in rows if tally.count or tally is report.reached]
    cells = [(what, str(tally.count), format_bytes(tally.bytes), why) for what, tally, why in shown]
    yield from align(cells, right=(1, 2))
    if report.missing:
        yield f"{report.missing} chunks that files need are missing: {suggested('repair', store.url)} restores them or names the files"
    if report.next_s is not None and not report.dry_run:
        yield f"run gc again in {report.next_s} s to delete the condemned objects"
    elif report.young.count and not report.dry_run:
        yield (
            f"gc condemns young chunks a grace ({store.descriptor.grace_s} s) after they were written, and a later run deletes them after another grace; "
            "--exclusive does both at once, while no other process writes"
        )


@command(
    "prune",
    "remove checkpoints that no rule keeps",
    """
    tierfs prune s3://bucket/run --keep latest:3 --keep every:10000 --dry-run
    tierfs prune s3://bucket/run --keep latest:3 --keep best:2:val_loss --keep within:2d
    """,
    URL,
    {
        "--keep RULE...": "`latest:N`, `every:STEPS`, `best:K:METRIC[:max]`, `within:2d` or `geometric[:BASE]`; a checkpoint is kept if any rule keeps it",
        "--pin NAME...": "name or URL of a checkpoint below URL to keep; may be given several times",
        "--dry-run": "remove nothing; show which rules keep each checkpoint",
    },
)
def run_prune(arguments: argparse.Namespace) -> int:
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
    return print_result(arguments, document, *_prune_lines(pruned, dry_run=arguments.dry_run), code=code)


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


def _prune_lines(pruned: list[Decision], *, dry_run: bool) -> list[str]:
    rows = []
    for each in pruned:
        saved = each.saved
        what = "kept" if each.is_kept else "removed" if each.removed else "would go" if dry_run else "failed"
        why = each.problem or ", ".join(each.reasons) or "no rule keeps it"
        rows.append((what, "-" if saved.step is None else str(saved.step), printable(saved.path), printable(why)))
    return align(rows, right=(1,), states=(0,)) or ["there are no checkpoints"]
