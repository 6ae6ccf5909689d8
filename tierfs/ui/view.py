"""`StoreView`: one URL of the page. Its threads poll the status and list the checkpoints, at a bounded cost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tierfs.checkpoint.retention import Rule
from tierfs.cli.arguments import suggested
from tierfs.cli.commands.status import UploadRate, age, status_here
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.terminal.output import describe
from tierfs.errors import TierfsError, without_passwords
from tierfs.host.pending.levels import Level
from tierfs.store.status import condition
from tierfs.threads import start_daemon
from tierfs.ui.checkpoints import CheckpointList, directory_of, pending_in
from tierfs.units import format_bytes

POLL_S, IDLE_POLL_S = 2.0, 10.0
"""Between two polls of the status: while a client looks, and while none does, for the history."""
WATCHED_S = 15.0
"""How long after its last request a client counts as looking."""
CONDITION_S, CONDITION_S_MIN = 60.0, 5.0
"""Reading the condition takes requests. It is done after the first time, or after the second one if files were published."""
SAMPLES_MAX = 300
LIST_S_MIN, LIST_S_MAX, LIST_SHARE = 5.0, 30.0, 400
"""A listing follows after `LIST_SHARE` times the processor's seconds that the last one took, which is 0.25 % of a
processor, but within these bounds: an old list costs more than the rest of a processor.
"""
PLAIN_S = 3.0
"""How long the page without JavaScript waits for a listing: it cannot show the rest later."""
ROWS_MAX = 64
"""How many rows on screen are looked up between two listings."""
_logger = logging.getLogger("tierfs.ui")
PROBLEM, NOTE = "problem", "note"
FULL = 0.9
"""The share of a tier's budget from which on its dirty bytes are an alarm: writers are about to wait."""
GC_AGE_S_MAX = 7 * 86400.0
"""gc is late after this time, which is many times the grace of any store."""


class _Schedule:
    """Says when a piece of work is due again: see `LIST_SHARE`."""

    def __init__(self) -> None:
        self._due_s = float("-inf")

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Do the work in the ``with`` block. Work of other threads counts, too: it may only make the pause longer."""
        begun_s = time.process_time()
        try:
            yield
        finally:
            pause_s = LIST_SHARE * (time.process_time() - begun_s)
            self._due_s = time.monotonic() + min(LIST_S_MAX, max(LIST_S_MIN, pause_s))


class StoreView:
    """The part of the page for one URL.

    Args:
        number: Its number in the address of the page.
        url: As given on the command line. ``self.url`` is the same without its password.
        rules: What to keep, for the reasons in the list.
        max_age_s: Seconds for which a change may wait for the object tier without an alarm.

    ``version`` counts the changes of the status, ``listings`` those listings that worked. ``list`` has its own version.
    """

    def __init__(self, number: int, url: str, rules: Sequence[Rule], max_age_s: float) -> None:
        self.number, self._url, self._max_age_s = number, url, max_age_s
        self.url = without_passwords(url)
        self.list, self.version, self.listings = CheckpointList(rules), 0, 0
        self._place: StorePlace | None = None
        self._report: dict[str, Any] = {}
        self._error: TierfsError | OSError | None = None
        self._list_error: TierfsError | OSError | None = None
        self._condition: dict[str, Any] = {}
        self._published: object = None
        self._rate = UploadRate()
        # Time, bytes per second to the object tier if they are known, queued bytes and files.
        self._history: deque[tuple[float, float | None, int, int]] = deque(maxlen=SAMPLES_MAX)
        self._watched_s = self._polled_s = self._condition_s = float("-inf")
        self._listed_s: float | None = None
        self._list_pace, self._rows_pace = _Schedule(), _Schedule()
        self._poll_lock, self._open_lock, self._rows_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._wakes, self._has_listed = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start the threads, which end with the process."""
        start_daemon(self._keep_polling, name="ui-status")
        start_daemon(self._keep_listing, name="ui-list")

    def open(self) -> StorePlace:
        """Return the place, as ``tierfs status`` opens it. Nothing that is read is kept in the local tiers.

        Raises:
            TierfsError: The store cannot be opened.
        """
        with self._open_lock:
            if self._place is None:
                place = store_place(self._url, as_configured=True, resumes=False)
                if place.store.tiers is not None:
                    place.store.tiers.cache.keeps_reads = False
                self._place = place
            return self._place

    def watch(self) -> None:
        """Note that a client looks, so that the figures are kept up to date."""
        if not self._is_watched:
            self._wakes.set()
        self._watched_s = time.monotonic()

    def report(self) -> dict[str, Any]:
        """Return the output of ``tierfs status --json``, at most `POLL_S` seconds old.

        Raises:
            TierfsError, OSError: The store cannot be read.
        """
        if time.monotonic() - self._polled_s > POLL_S:
            self._poll()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._report

    def status(self) -> dict[str, Any]:
        """Return what the page shows above the list: status, alarms, rates, and the samples of the last ten minutes."""
        alarms = []
        if error := self._error or self._list_error:
            what = self.url if self._error else "The checkpoints cannot be listed"
            alarms.append(alarm(PROBLEM, f"{what}: {describe(error).message}"))
        alarms += alarms_in(self._report, max_age_s=self._max_age_s, now_s=time.time()) if self._report else []
        return {
            "store": self.number,
            "url": self.url if self._place is None else self._place.url,
            "report": self._report or None,
            "error": None if self._error is None else describe(self._error).kind,
            "alarms": alarms,
            "history": list(self._history),
            "list_age_s": self.list_age_s,
        }

    @property
    def list_age_s(self) -> float | None:
        """How many seconds ago the listing began that the list is from; ``None`` before the first one has ended."""
        return None if self._listed_s is None else time.monotonic() - self._listed_s

    def checkpoints(
        self, since: int | None, limit: int | None = None, rows: Sequence[str] = (), wait_s: float | None = None
    ) -> dict[str, Any]:
        """Return rows that changed after a version of the list; for ``None`` all rows, after a listing if one is due.

        Args:
            since: The version.
            limit: How many rows at most.
            rows: Paths of the rows on screen. Their checkpoints are looked up first, if that is due.
            wait_s: How long to wait for a listing; ``None`` until it ends.

        Raises:
            TierfsError, OSError: No listing has worked yet, and the last one failed. Only if ``since`` is ``None``.
        """
        self.watch()
        if since is None and self._list_pace.is_due:
            self._has_listed.clear()
            self._wakes.set()
            self._has_listed.wait(wait_s)
        if since is None and self._listed_s is None and self._list_error is not None:
            raise self._list_error.with_traceback(None)
        self._look_up(rows[:ROWS_MAX])
        return {**self.list.changes(since or 0, limit), "age_s": self.list_age_s}

    def plain(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the status, and the list after a listing that takes at most `PLAIN_S`."""
        try:
            listed = self.checkpoints(None, wait_s=PLAIN_S)
        except (TierfsError, OSError):  # an alarm says so
            listed = self.checkpoints(0)
        return self.status(), listed

    def _look_up(self, rows: Sequence[str]) -> None:
        """Look whether the checkpoints of rows are still there, unless another client does. A failure is the listing's."""
        if rows and self._rows_pace.is_due and self._rows_lock.acquire(blocking=False):
            try:
                with self._rows_pace.turn(), contextlib.suppress(TierfsError, OSError):
                    self.list.look_up(self.open(), rows)
            finally:
                self._rows_lock.release()

    @property
    def _is_watched(self) -> bool:
        return time.monotonic() - self._watched_s < WATCHED_S

    def _keep_polling(self) -> None:
        while True:
            if time.monotonic() - self._polled_s >= (POLL_S if self._is_watched else IDLE_POLL_S):
                self._poll()
            time.sleep(POLL_S)

    def _poll(self) -> None:
        with self._poll_lock:
            now_s = time.monotonic()
            try:
                store = self.open().store
                report = status_here(store)
                published, age_s = report["counters"].get("flusher_published_files"), now_s - self._condition_s
                if age_s >= CONDITION_S or (published != self._published and age_s >= CONDITION_S_MIN):
                    self._condition, self._condition_s, self._published = condition(store), now_s, published
                report |= self._condition
            except (TierfsError, OSError) as error:
                self._fail(error, self._error)
                self._error, self._polled_s = error, now_s
                return
            rate = self._rate.sample(report, now_s)
            if rate is None and not report["flusher"].get("running"):
                rate = 0.0
            self._history.append((time.time(), rate, report["queue_bytes"], report["queue_files"]))
            self.version += bool(rate or report != self._report or self._error)
            self._report, self._error, self._polled_s = report, None, now_s

    def _fail(self, error: TierfsError | OSError, before: TierfsError | OSError | None) -> None:
        if str(error) != str(before):
            self.version += 1
            _logger.warning("%s: %s", self.url, describe(error).message)

    def _keep_listing(self) -> None:
        pending: dict[str, Level] = {}
        while True:
            self._wakes.wait(POLL_S)
            self._wakes.clear()
            if not self._is_watched:
                continue
            try:
                place = self.open()
                now = pending_in(place)
                if self._list_pace.is_due:
                    begun_s = time.monotonic()
                    with self._list_pace.turn():
                        self.list.refresh(place)
                    self._listed_s, self.listings = begun_s, self.listings + 1
                else:
                    changed = now if "peers" in self._report else dict(now.items() ^ pending.items())
                    self.list.look_at(place, {directory_of(path) for path in changed} | self.list.take_changed())
                pending, self._list_error = now, None
            except (TierfsError, OSError) as error:
                if self._error is None:
                    self._fail(error, self._list_error)
                self._list_error = error
            finally:
                self._has_listed.set()


_Found: TypeAlias = Iterator[tuple[str, str, str, tuple[str, ...]]]


def alarms_in(report: Mapping[str, Any], *, max_age_s: float, now_s: float) -> list[dict[str, str]]:
    """Return the alarms of a store by the output of ``tierfs status --json``, problems first.

    ``max_age_s`` is how long a change may wait for the object tier, ``now_s`` the time since the epoch, in seconds.

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
