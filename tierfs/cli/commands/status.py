"""``tierfs status``: show a store's tiers on this host, its pending files, and its errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tierfs.checkpoint.step_logs import lengths_below, logs_of
from tierfs.cli.arguments import URL, command, suggested
from tierfs.cli.commands._status_prometheus import exposition
from tierfs.cli.files.places import store_place
from tierfs.cli.terminal.output import add_json_argument, align, colored, format_time, print_json, printable
from tierfs.errors import StoreError
from tierfs.store import Store, status
from tierfs.store.status import condition
from tierfs.units import format_bytes

WATCH_S = 2.0
WATCH_S_MIN = 0.1
WATCH_S_MAX = 86400.0
LISTED_MAX = 20
_TIERS = ("ram", "nvme", "object")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
# Counters of a tier that have a line only if they are not zero.
_NOTABLE = ("waits", "waited_s", "evicted_bytes", "damaged")


def _output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"repeat every SECONDS (default: {WATCH_S:g}) until Ctrl-C, in place on a terminal, else as one line each time; URL goes before it",
    )
    output.add_argument(
        "--prometheus",
        action="store_true",
        help="print it in Prometheus's text format, for example for node_exporter's textfile collector",
    )
    add_json_argument(output)


@command(
    "status",
    "show a store's tiers, pending files, conflicts and errors on this host",
    """
    tierfs status tierfs::s3://bucket/run
    tierfs status tierfs::s3://bucket/run --watch
    tierfs status tierfs::s3://bucket/run --prometheus | sponge /var/lib/node_exporter/tierfs.prom
    """,
    URL,
    _output_options,
)
def run(arguments: argparse.Namespace) -> int:
    store = store_place(arguments.url, as_configured=True, resumes=False).store
    if arguments.watch is not None:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(store, arguments.watch)
        return 0
    report = status_here(store)
    report |= condition(store)
    if arguments.json:
        print_json(report)
    elif arguments.prometheus:
        print(exposition(report), end="")
    else:
        print("\n".join(table(report, UploadRate().sample(report, time.monotonic()))))
    return StoreError.exit_code if store.tiers is None and report["errors"] else 0


def status_here(store: Store) -> dict[str, Any]:
    """Return `tierfs.store.status`, and how much the logs of steps in memory hold."""
    with logs_of(store) as logs:
        lengths = [length for log in logs for length in lengths_below(log).values()]
    return status(store) | {"ram_only_files": len(lengths), "ram_only_bytes": sum(lengths)}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; the URL goes before --watch") from None
    if not WATCH_S_MIN <= seconds <= WATCH_S_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {WATCH_S_MIN:g} and {WATCH_S_MAX:g} seconds")
    return seconds


def _watch(store: Store, interval_s: float) -> None:
    rate = UploadRate()
    with _painting() as paint:
        while True:
            report = status_here(store)
            paint(report, rate.sample(report, time.monotonic()))
            time.sleep(interval_s)


@contextlib.contextmanager
def _painting() -> Iterator[Callable[[Mapping[str, Any], float | None], None]]:
    """Return the function that shows a status repeatedly: in place on a terminal, else as one line each time."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda report, rate: print(one_line(report, rate), flush=True)
        return
    from rich.live import Live  # noqa: PLC0415 - 50 ms, for a terminal only
    from rich.text import Text  # noqa: PLC0415

    def paint(report: Mapping[str, Any], rate: float | None) -> None:
        lines = "\n".join(table(report, rate))
        live.update(Text.from_ansi(lines, no_wrap=True, overflow="crop"), refresh=True)

    # Do not redirect a log that goes to a file. Do not redirect stdout: `table` checks whether it is a terminal.
    is_terminal = sys.stderr.isatty()
    with Live(auto_refresh=False, vertical_overflow="crop", redirect_stdout=False, redirect_stderr=is_terminal) as live:
        yield paint


class UploadRate:
    """Bytes per second to the object tier: from two samples of the flusher's counter, else the flusher's own figure."""

    def __init__(self) -> None:
        self._last: tuple[object, float, float] | None = None

    def sample(self, report: Mapping[str, Any], now_s: float) -> float | None:
        """Record a result of `tierfs.store.status`, and return the rate since the previous one; None if it is unknown.

        ``now_s`` is the time of the sample, on a monotonic clock.
        """
        last, self._last = self._last, None
        count = report.get("counters", {}).get("flusher_uploaded_bytes")
        pid = report.get("flusher", {}).get("pid")
        if isinstance(count, (int, float)):
            self._last = (pid, now_s, count)
            # A new flusher counts from 0.
            if last is not None and last[0] == pid and now_s > last[1] and count >= last[2]:
                return (count - last[2]) / (now_s - last[1])
        said = report.get("rate_bytes_per_s")
        return float(said) if isinstance(said, (int, float)) else None


def table(report: Mapping[str, Any], rate: float | None) -> list[str]:
    """Write the result of `tierfs.store.status` as lines. ``rate`` is in bytes per second, None if unknown."""
    queue = f"{report['queue_files']} files, {format_bytes(report['queue_bytes'])}"
    if report["queue_files"]:
        queue += f", oldest {age(report['oldest_age_s'])}"
    facts = [
        ("store", printable(report["store"])),
        ("uuid", report["uuid"]),
        ("writes return at", report["ack"]),
        ("flusher", _flusher(report["flusher"])),
        ("queue", queue),
        ("upload", "unknown" if rate is None else f"{format_bytes(round(rate))}/s"),
    ]
    if report.get("ram_only_files"):
        facts.append(
            (
                "in ram only",
                f"{report['ram_only_files']} files, {format_bytes(report['ram_only_bytes'])}: logs of steps",
            )
        )
    if "peers" in report:
        facts += _peers(report["peers"])
    if "peer_problem" in report:
        facts.append(("peers", f"off: {printable(report['peer_problem'])}"))
    if "records" in report:
        facts.append(("record cache", _records(report["records"])))
    facts += _upkeep(report.get("upkeep", {}))
    for key, what in (("missing_chunks", "chunks that files need"), ("vanished_records", "records")):
        if report.get(key):
            facts.append(("missing", f"{report[key]} {what} are MISSING: run {suggested('repair', report['store'])}"))
    return [*align(facts), "", *_tiers(report["tiers"]), *_problems(report), *_requests(report), *_counters(report)]


def one_line(report: Mapping[str, Any], rate: float | None) -> str:
    """Write the quantities that change often as one line for a log."""
    words = [
        format_time(time.time_ns()),
        f"queue {report['queue_files']} files {format_bytes(report['queue_bytes'])}",
        f"oldest {age(report['oldest_age_s'])}",
        f"upload {'unknown' if rate is None else f'{format_bytes(round(rate))}/s'}",
    ]
    for tier in _TIERS:
        values = report["tiers"].get(tier, {})
        if "used_bytes" in values:
            used, budget, dirty = (format_bytes(values[key]) for key in ("used_bytes", "budget_bytes", "dirty_bytes"))
            words.append(f"{tier} {used} of {budget}, dirty {dirty}")
    words.append(f"flusher {_flusher(report['flusher'])}")
    words.append(f"conflicts {_conflicts(report)}, errors {_errors(report)}")
    return "; ".join(words)


def _flusher(flusher: Mapping[str, Any]) -> str:
    if not flusher.get("running"):
        return "not running"
    if "silent" in flusher:
        return f"runs, but does not answer: {printable(flusher['silent'])}"
    return f"runs, pid {flusher['pid']}"


def _peers(peers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Describe which hosts hold changes of this one, and what this one holds for others."""
    hosts = [
        f"{printable(host['host'])} at {printable(host['address'])} holds {host['held_files']} files"
        + ("" if host["connected"] else " (not connected)")
        for host in peers["hosts"]
    ]
    used, budget = format_bytes(peers["holds_bytes"]), format_bytes(peers["budget_bytes"])
    held = f"{peers['holds_files']} files for {len(peers['holds_for'])} hosts, {used} of {budget}"
    found = [f"{len(hosts)} of {peers['wanted']} wanted"]
    if peers.get("unreadable"):
        found.append(f"{peers['unreadable']} records in .tierfs/peers/ cannot be read")
    return [("peers", "; ".join([*found, *hosts])), ("holds for peers", held)]


def _records(records: Mapping[str, Mapping[str, int]]) -> str:
    """Describe the cache of records, which saves a listing from fetching them again."""
    text = f"up to {format_bytes(records['process']['bytes_max'])} in each process"
    if "host" in records:
        used, room = (format_bytes(records["host"][key]) for key in ("bytes", "bytes_max"))
        text += f"; {used} of {room} on this host"
    return text


def _upkeep(upkeep: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Describe the last gc and the last scrub of the store on any host."""
    gc, scrub = upkeep.get("gc"), upkeep.get("scrub")
    if gc and "deleted" in gc:
        deleted, waiting = gc["deleted"], gc["waiting"]["bytes"] + gc["condemned"]["bytes"]
        text = f"{format_time(gc['ended_ns'])}, deleted {deleted['count']} chunks, {format_bytes(deleted['bytes'])}; "
        text += f"{format_bytes(waiting)} are condemned"
        if encoded := gc.get("reencoded", {}).get("count"):
            text += f"; {encoded} chunks were encoded that were sent raw"
        if gc["unreadable_count"]:
            named = ", ".join(map(printable, gc["unreadable"][:3]))
            text = f"{format_time(gc['ended_ns'])}, BLOCKED: {gc['unreadable_count']} records cannot be read or have vanished: {named}"
        yield "last gc", text
    if scrub and "chunks" in scrub:
        text = f"{format_time(scrub['ended_ns'])}, verified {scrub['chunks']} chunks, {format_bytes(scrub['bytes'])}"
        if scrub["known_damaged"]:
            text += f"; {scrub['known_damaged']} are DAMAGED: run `tierfs repair`"
        yield "last scrub", text


def _tiers(tiers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [("tier", "used", "budget", "dirty", "clean", "level", "")]
    for tier in ("device", *_TIERS) if "device" in tiers else _TIERS:
        values = tiers.get(tier)
        if values is None:
            rows.append((tier, "off", "", "", "", "", ""))
            continue
        sizes = [
            format_bytes(values[key]) if key in values else "-"
            for key in ("used_bytes", "budget_bytes", "dirty_bytes", "clean_bytes")
        ]
        note = f"survives the {values['survives']}" if "survives" in values else ""
        note += ", writes are read back" if values.get("reads_back") else ""
        note = printable(values.get("problem", note))
        if tier == "device":
            note = _snapshots(values)
        if values.get("host_bytes"):
            taken = f"{format_bytes(values['host_bytes'])} taken by this host's stores"
            note = f"{taken}. {note}" if note else taken
        rows.append((tier, sizes[0], sizes[1], sizes[2], sizes[3], str(values.get("gives", "")), note))
    return align(rows, right=(1, 2, 3, 4), has_head=True, states=(5,))


def _snapshots(values: Mapping[str, Any]) -> str:
    """Describe the device tier: number of snapshots, age of the newest, speed of the drain."""
    newest_s = values.get("newest_age_s")
    words = [
        f"{values['snapshots']} of {values['generations']} snapshots"
        + ("" if newest_s is None else f", the newest {age(newest_s)} old")
    ]
    if values.get("drain_bytes_per_s"):
        words.append(f"drained at {format_bytes(values['drain_bytes_per_s'])}/s")
    if values.get("unpinned"):
        words.append(f"{values['unpinned']} regions of shared memory are not registered with the GPU")
    return "; ".join(words)


def _problems(report: Mapping[str, Any]) -> Iterator[str]:
    conflicts = [(item["path"], item["message"]) for item in report["conflicts"]]
    errors = [(item["path"], _tried(item)) for item in report["errors"]]
    for title, count, items in (
        (
            "conflicts: another writer changed the file first; `tierfs flusher discard` deletes this host's change",
            _conflicts(report),
            conflicts,
        ),
        ("errors", _errors(report), errors),
    ):
        if items:
            yield from ("", colored(title, "problem"))
            yield from (f"  {printable(path)}: {printable(message)}" for path, message in items[:LISTED_MAX])
        if count > LISTED_MAX:
            yield f"  ... and {count - LISTED_MAX} more"
    folders = report.get("unused_folders", [])
    if folders:
        yield from (
            "",
            "shared memory that no process uses; it is kept while its state directory may become available again",
        )
        for item in folders[:LISTED_MAX]:
            whose = printable(item["state_directory"]) or "unknown"
            yield f"  {printable(item['folder'])}: {format_bytes(item['bytes'])}, of the state directory {whose}"
    if report["misplaced"]:
        yield from (
            "",
            "folders in the working directory that belong to no store: a program used a tierfs URL as a local path",
        )
        yield from (f"  {printable(path)}" for path in report["misplaced"][:LISTED_MAX])


def _tried(error: Mapping[str, Any]) -> str:
    return f"attempt {error['attempts']}: {error['message']}" if error["attempts"] else str(error["message"])


def _conflicts(report: Mapping[str, Any]) -> int:
    """Count the conflicts. A flusher lists only some of them, and reports the number of all."""
    return int(report.get("conflict_files", len(report["conflicts"])))


def _errors(report: Mapping[str, Any]) -> int:
    return int(report.get("failing_files", len(report["errors"])))


def _requests(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [("requests to the object tier", "count", "errors", "bytes", "seconds")]
    for name, counts in report["tiers"].get("object", {}).get("requests", {}).items():
        size, seconds = format_bytes(counts["bytes"]), f"{counts['seconds']:.3f}"
        rows.append((f"  {name.replace('_', ' ')}", str(counts["requests"]), str(counts["errors"]), size, seconds))
    if len(rows) > 1:
        yield from ("", *align(rows, right=(1, 2, 3, 4), has_head=True))


def _counters(report: Mapping[str, Any]) -> Iterator[str]:
    counts: dict[str, float] = {}
    for tier in _TIERS:
        values = report["tiers"].get(tier, {})
        counts |= {f"{tier}_{name}": values[name] for name in _NOTABLE if name in values}
        counts |= {f"{tier}_fallback_{name}": count for name, count in values.get("fallbacks", {}).items()}
    counts |= {name: report.get(name, 0) for name in ("unreadable_drafts", "unread_segments")}
    counts |= report["counters"]
    rows = [(f"  {name.replace('_', ' ')}", _count(name, count)) for name, count in counts.items() if count]
    if rows:
        yield from ("", "counters")
        yield from align(rows, right=(1,))


def _count(name: str, count: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(int(count))
    return f"{count:.3f}" if isinstance(count, float) else str(count)


def age(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h" if seconds < _DAY_S else f"{seconds / _DAY_S:.1f} d"
