"""The alarms of a store: each names what is wrong, and the command that helps. A pure function of the status."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tierfs.cli.arguments import suggested
from tierfs.units import format_bytes

PROBLEM, NOTE = "problem", "note"
FULL = 0.9
"""The share of a tier's budget from which on its dirty bytes are an alarm: writers are about to wait."""
GC_AGE_S_MAX = 7 * 86400.0
"""gc is late after this time, which is many times the grace of any store."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that a person should know.

    Attributes:
        severity: ``problem``, or ``note`` if nothing is at risk.
        what: What is wrong, in one sentence.
        do: What to do, in words; empty if the command says it.
        command: The command to run; empty if there is none.
    """

    severity: str
    what: str
    do: str = ""
    command: str = ""


def alarms_in(report: Mapping[str, Any], *, max_age_s: float, now_s: float | None = None) -> list[Alarm]:
    """Return the alarms of a store, problems first.

    Args:
        report: The output of ``tierfs status --json``.
        max_age_s: Seconds for which a change may wait for the object tier.
        now_s: The time, in seconds since the epoch; by default, the present.
    """
    url = str(report["store"])
    found = [
        *_waiting(report, url, max_age_s),
        *_damage(report, url),
        *_tiers(report, url),
        *_upkeep(report, url, time.time() if now_s is None else now_s),
        *_left(report),
    ]
    return sorted(found, key=lambda alarm: alarm.severity != PROBLEM)


def _waiting(report: Mapping[str, Any], url: str, max_age_s: float) -> Iterator[Alarm]:
    """Yield what keeps changes from the object tier."""
    queue, flusher = report["queue_files"], report["flusher"]
    if queue and report["oldest_age_s"] > max_age_s:
        size = format_bytes(report["queue_bytes"])
        text = f"{_count(queue, 'file')} ({size}) waited up to {_time(report['oldest_age_s'])} for the object tier"
        yield Alarm(PROBLEM, text, command=_command("wait", url))
    if "silent" in flusher:
        yield Alarm(
            PROBLEM,
            f"The flusher does not answer: {flusher['silent']}",
            "Stop it; the next write starts another one.",
            _command("flusher", "stop", url),
        )
    elif queue and not flusher.get("running"):
        yield Alarm(PROBLEM, f"{_count(queue, 'file')} wait, and no flusher runs", command=_command("wait", url))
    failing = int(report.get("failing_files", len(report["errors"])))
    for error in report["errors"][:1]:
        tried = f", {_count(error['attempts'], 'attempt')}" if error["attempts"] else ""
        many = f" of {failing} files" if failing > 1 else ""
        text = f"The flush{many} fails{tried}: {error['path'] or url}: {error['message']}"
        yield Alarm(PROBLEM, text, "The flusher tries again.", _command("probe", url))
    conflicts = int(report.get("conflict_files", len(report["conflicts"])))
    for conflict in report["conflicts"][:1]:
        path = f"{url}/{conflict['path']}"
        text = f"{_count(conflicts, 'file')} in conflict: {conflict['path']}: {conflict['message']}"
        yield Alarm(
            PROBLEM,
            text,
            "Export the change of this host, then discard it.",
            _command("flusher", "export", path, "FILE"),
        )


def _damage(report: Mapping[str, Any], url: str) -> Iterator[Alarm]:
    repair = _command("repair", url)
    scrub = report.get("upkeep", {}).get("scrub", {})
    if scrub.get("known_damaged"):
        text = f"{_count(scrub['known_damaged'], 'chunk')} in the object tier known to be damaged"
        yield Alarm(PROBLEM, text, "Other tiers and copies of the store may heal them.", repair)
    for key, what in (("missing_chunks", "chunk"), ("vanished_records", "record")):
        if report.get(key):
            yield Alarm(PROBLEM, f"{_count(report[key], what)} missing from the object tier", command=repair)
    if report.get("lost_bytes"):
        text = f"{format_bytes(report['lost_bytes'])} lie in .tierfs/lost/, where a repair moved them"
        yield Alarm(NOTE, text, command=_command("verify", url))
    counters = report.get("counters", {})
    bad = sum(count for key, count in counters.items() if key.partition("_")[2] in {"bad_local_copies", "kept_damage"})
    if bad:
        text = f"{_count(int(bad), 'damaged local copy', 'damaged local copies')} found by reads, and not used"
        yield Alarm(NOTE, text, "Memory or the disk of this host may be failing.", _command("doctor"))
    unread = report.get("unreadable_drafts", 0) + report.get("unread_segments", 0)
    damaged = sum(values.get("damaged", 0) for values in report["tiers"].values())
    if unread or damaged:
        text = f"{_count(unread + damaged, 'change')} of this host cannot be read from its memory or disk"
        yield Alarm(PROBLEM, text, "Save these checkpoints again.", _command("status", url))


def _tiers(report: Mapping[str, Any], url: str) -> Iterator[Alarm]:
    for tier, values in report["tiers"].items():
        if values.get("problem"):
            yield Alarm(PROBLEM, f"The {tier} tier: {values['problem']}", command=_command("doctor"))
        budget, dirty = values.get("budget_bytes") or 0, values.get("dirty_bytes") or 0
        if budget and dirty >= FULL * budget:
            text = f"The {tier} tier is full of changes that the object tier lacks: {format_bytes(dirty)} of {format_bytes(budget)}"
            yield Alarm(PROBLEM, text, "Writers wait for room until they are uploaded.", _command("wait", url))
    if report.get("peer_problem"):
        yield Alarm(PROBLEM, f"Peers are off: {report['peer_problem']}", command=_command("status", url))
    peers = report.get("peers", {})
    connected = sum(bool(host["connected"]) for host in peers.get("hosts", ()))
    if connected < peers.get("wanted", 0):
        text = f"{connected} of {peers['wanted']} peers are connected"
        yield Alarm(
            PROBLEM, text, "Changes are lost with this host until they reach the object tier.", _command("status", url)
        )


def _upkeep(report: Mapping[str, Any], url: str, now_s: float) -> Iterator[Alarm]:
    gc = report.get("upkeep", {}).get("gc", {})
    if gc.get("unreadable_count"):
        named = ", ".join(map(str, gc["unreadable"][:3]))
        text = f"The last gc deleted nothing: {_count(gc['unreadable_count'], 'record')} cannot be read: {named}"
        yield Alarm(PROBLEM, text, "Copy the records back, or remove those files.", _command("repair", url))
    elif gc and (age_s := now_s - gc.get("ended_ns", 0) / 1e9) > GC_AGE_S_MAX:
        yield Alarm(NOTE, f"gc last ran {_time(age_s)} ago", command=_command("gc", url))


def _left(report: Mapping[str, Any]) -> Iterator[Alarm]:
    for path in report.get("misplaced", ())[:3]:
        text = f"A program used a tierfs URL as a local path: {path} belongs to no store"
        yield Alarm(PROBLEM, text, "Copy its files into a store, then remove it.", _command("cp", "-r", path, "URL"))
    folders = report.get("unused_folders", ())
    if folders:
        size = format_bytes(sum(folder["bytes"] for folder in folders))
        text = f"{_count(len(folders), 'folder')} of shared memory ({size}) used by no process"
        yield Alarm(
            NOTE,
            text,
            "They are kept while their state directories may come back.",
            _command("status", str(report["store"])),
        )


def _command(*words: str) -> str:
    return suggested(*words).strip("`")


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _time(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
