"""The alarms of a store: each names what is wrong, and the command that helps. A pure function of the status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from tierfs.cli.arguments import suggested
from tierfs.cli.commands.status import age
from tierfs.units import format_bytes

PROBLEM, NOTE = "problem", "note"
FULL = 0.9
"""The share of a tier's budget from which on its dirty bytes are an alarm: writers are about to wait."""
GC_AGE_S_MAX = 7 * 86400.0
"""gc is late after this time, which is many times the grace of any store."""
_Found: TypeAlias = Iterator[tuple[str, str, str, tuple[str, ...]]]


def alarms_in(report: Mapping[str, Any], *, max_age_s: float, now_s: float) -> list[dict[str, str]]:
    """Return the alarms of a store, problems first.

    Args:
        report: The output of ``tierfs status --json``.
        max_age_s: Seconds for which a change may wait for the object tier.
        now_s: The time, in seconds since the epoch.

    Returns:
        ``severity``: ``problem``, or ``note`` if nothing is at risk. ``what`` is wrong, in one sentence. ``do``: what to
        do, in words. ``command``: the command to run.
    """
    url = str(report["store"])
    found = (*_queue(report, url, max_age_s), *_damage(report, url), *_tiers(report, url), *_upkeep(report, url, now_s))
    alarms = [alarm(severity, what, do, *words) for severity, what, do, words in found]
    return sorted(alarms, key=lambda one: one["severity"] != PROBLEM)


def alarm(severity: str, what: str, do: str = "", *words: str) -> dict[str, str]:
    """Return one alarm. ``words`` are those of the command after ``tierfs``."""
    return {"severity": severity, "what": what, "do": do, "command": suggested(*words).strip("`") if words else ""}


def _queue(report: Mapping[str, Any], url: str, max_age_s: float) -> _Found:
    """Find what keeps changes from the object tier."""
    flusher, age_s = report["flusher"], report["oldest_age_s"]
    queue = f"{_count(report['queue_files'], 'file')} ({format_bytes(report['queue_bytes'])})"
    if report["queue_files"] and age_s > max_age_s:
        yield PROBLEM, f"{queue} waited up to {age(age_s)} for the object tier", "", ("wait", url)
    if "silent" in flusher:
        do = "Stop it. The next write starts another one."
        yield PROBLEM, f"The flusher does not answer: {flusher['silent']}", do, ("flusher", "stop", url)
    elif report["queue_files"] and not flusher.get("running"):
        yield PROBLEM, f"{queue} wait for the object tier, and no flusher runs", "", ("wait", url)
    for error in report["errors"][:1]:
        failing = int(report.get("failing_files", len(report["errors"])))
        many, tries = f" of {failing} files" if failing > 1 else "", f"{_count(error['attempts'], 'attempt')}: "
        text = f"The flush{many} fails, {tries if error['attempts'] else ''}{error['path'] or url}: {error['message']}"
        yield PROBLEM, text, "The flusher tries again.", ("probe", url)
    for conflict in report["conflicts"][:1]:
        count = _count(int(report.get("conflict_files", len(report["conflicts"]))), "file")
        text = f"{count} in conflict: {conflict['path']}: {conflict['message']}"
        yield (
            PROBLEM,
            text,
            "Export this change, then discard it.",
            ("flusher", "export", f"{url}/{conflict['path']}", "FILE"),
        )


def _damage(report: Mapping[str, Any], url: str) -> _Found:
    """Find what is damaged or missing, by reads, gc, scrub and repair."""
    if damaged := report.get("upkeep", {}).get("scrub", {}).get("known_damaged"):
        yield PROBLEM, f"{_count(damaged, 'chunk')} of the object tier known to be damaged", "", ("repair", url)
    for key, what in (("missing_chunks", "chunk"), ("vanished_records", "record")):
        if report.get(key):
            yield PROBLEM, f"{_count(report[key], what)} missing from the object tier", "", ("repair", url)
    if lost := report.get("lost_bytes"):
        yield NOTE, f"{format_bytes(lost)} lie in .tierfs/lost/, where a repair moved them", "", ("verify", url)
    if bad := sum(
        count for key, count in report["counters"].items() if key.endswith(("bad_local_copies", "kept_damage"))
    ):
        yield NOTE, f"Reads found {_count(int(bad), 'damaged piece')} in memory or on the disk", "", ("doctor",)
    unread = report.get("unreadable_drafts", 0) + report.get("unread_segments", 0)
    if unread := unread + sum(values.get("damaged", 0) for values in report["tiers"].values()):
        text = f"{_count(unread, 'change')} of this host cannot be read from memory or disk"
        yield PROBLEM, text, "Save these checkpoints again.", ("status", url)


def _tiers(report: Mapping[str, Any], url: str) -> _Found:
    for tier, values in report["tiers"].items():
        if values.get("problem"):
            yield PROBLEM, f"The {tier} tier: {values['problem']}", "", ("doctor",)
        budget, dirty = values.get("budget_bytes") or 0, values.get("dirty_bytes") or 0
        if budget and dirty >= FULL * budget:
            text = f"The {tier} tier is full: the object tier lacks {format_bytes(dirty)} of {format_bytes(budget)}"
            yield PROBLEM, text, "Writers wait for room.", ("wait", url)
    if report.get("peer_problem"):
        yield PROBLEM, f"Peers are off: {report['peer_problem']}", "", ("status", url)
    peers = report.get("peers", {"hosts": (), "wanted": 0})
    connected = sum(bool(host["connected"]) for host in peers["hosts"])
    if connected < peers["wanted"]:
        yield PROBLEM, f"{connected} of {peers['wanted']} peers are connected", "", ("status", url)


def _upkeep(report: Mapping[str, Any], url: str, now_s: float) -> _Found:
    """Find a gc that does not work, and what programs left behind."""
    gc = report.get("upkeep", {}).get("gc", {})
    if gc.get("unreadable_count"):
        named = ", ".join(map(str, gc["unreadable"][:3]))
        text = f"The last gc deleted nothing: {_count(gc['unreadable_count'], 'record')} cannot be read: {named}"
        yield PROBLEM, text, "Copy the records back, or remove those files.", ("repair", url)
    elif gc and (age_s := now_s - gc.get("ended_ns", 0) / 1e9) > GC_AGE_S_MAX:
        yield NOTE, f"gc last ran {age(age_s)} ago", "", ("gc", url)
    for path in report["misplaced"][:3]:
        text = f"A program used a tierfs URL as a local path: {path} belongs to no store"
        yield PROBLEM, text, "Copy its files into a store, then remove it.", ("cp", "-r", path, "URL")
    if folders := report["unused_folders"]:
        size = format_bytes(sum(each["bytes"] for each in folders))
        text = f"{_count(len(folders), 'folder')} of shared memory ({size}) used by no process"
        yield NOTE, text, "They are kept while their state directories may come back.", ("status", url)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
