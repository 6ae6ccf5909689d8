"""`StoreView`: one URL of the page. Its threads poll the status and list the checkpoints, at a bounded cost."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tierfs.checkpoint.retention import Rule
from tierfs.cli.commands.status import UploadRate
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.terminal.failures import describe
from tierfs.errors import TierfsError
from tierfs.format.checkpoint import ROOT, is_save_id, rank_of
from tierfs.store import status
from tierfs.store.announced_saves import PENDING
from tierfs.store.maintenance.condition import condition
from tierfs.threads import start_daemon
from tierfs.ui.alarms import PROBLEM, Alarm, alarms_in
from tierfs.ui.checkpoints import CheckpointList, pending_in

POLL_S = 2.0
IDLE_POLL_S = 10.0
"""Between two polls while nobody looks, for the history."""
WATCHED_S = 15.0
"""How long after its last request a client counts as looking."""
CONDITION_S, CONDITION_S_MIN = 60.0, 5.0
"""The condition costs requests to the object tier. It is read again after the first time, or if a file was published
since, after the second one."""
HISTORY_S = 600.0
LIST_S_MIN = 5.0
LIST_SHARE = 400
"""A listing is repeated after this many times the seconds that the last one took, so all take 0.25 % of a processor."""
_logger = logging.getLogger("tierfs.ui")


class StoreView:
    """The part of the page for one URL.

    Args:
        number: Its number in the address of the page.
        url: As given on the command line.
        rules: What to keep, for the reasons in the list.
        max_age_s: Seconds for which a change may wait for the object tier without an alarm.
    """

    def __init__(self, number: int, url: str, rules: Sequence[Rule], max_age_s: float) -> None:
        self.number = number
        self.url = url
        self.list = CheckpointList(rules)
        self.version = 0
        """Counts the changes of the status and of the list."""
        self._max_age_s = max_age_s
        self._place: StorePlace | None = None
        self._report: dict[str, Any] | None = None
        self._condition: dict[str, Any] = {}
        self._condition_s = -CONDITION_S
        self._published: object = None
        self._rate, self._rate_now = UploadRate(), 0.0
        self._history: deque[tuple[float, float, float, int, float]] = deque()
        self._problem: dict[str, Any] | None = None
        self._list_problem: str | None = None
        self._watched_s, self._polled_s, self._listed_s = -WATCHED_S, -POLL_S, -LIST_S_MIN
        self._cost_s = 0.0
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._turn = threading.Event()
        self._has_listed = threading.Event()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"StoreView({self.url!r})"

    def start(self) -> None:
        """Start the threads."""
        start_daemon(self._keep_polling, name="ui-status")
        start_daemon(self._keep_listing, name="ui-list")

    def close(self) -> None:
        """End the threads after their current steps."""
        self._is_closed = True
        self._turn.set()

    def open(self) -> StorePlace:
        """Return the place, as `tierfs status` opens it. Nothing that is read is kept in the local tiers.

        Raises:
            TierfsError: The store cannot be opened.
        """
        with self._opening:
            if self._place is None:
                place = store_place(self.url, as_configured=True, resumes=False)
                if place.store.tiers is not None:
                    place.store.tiers.cache.keeps_reads = False
                self._place = place
            return self._place

    def watch(self) -> None:
        """Note that a client looks, so that the figures are kept up to date."""
        was_idle = time.monotonic() - self._watched_s > WATCHED_S
        self._watched_s = time.monotonic()
        if was_idle:
            self._turn.set()

    def report(self) -> dict[str, Any]:
        """Return the output of ``tierfs status --json``, at most `POLL_S` seconds old.

        Raises:
            TierfsError, OSError: The store cannot be read.
        """
        if time.monotonic() - self._polled_s > POLL_S or self._report is None:
            self._poll()
        if self._report is None:
            self.open()
            raise TierfsError(str(self._problem))
        return self._report

    def status(self) -> dict[str, Any]:
        """Return what the page shows above the list: status, alarms, rates, and the last sample of the history."""
        alarms = [] if self._report is None else alarms_in(self._report, max_age_s=self._max_age_s)
        if self._problem is not None:
            alarms.insert(0, Alarm(PROBLEM, f"{self.url}: {self._problem['message']}"))
        elif self._list_problem is not None:
            alarms.insert(0, Alarm(PROBLEM, f"The checkpoints cannot be listed: {self._list_problem}"))
        first = self._history[0] if self._history else None
        last = self._history[-1] if self._history else None
        spent_s = last[0] - first[0] if first and last else 0.0
        sent = last[4] - first[4] if first and last else 0.0
        return {
            "store": self.number,
            "url": self.url if self._place is None else self._place.url,
            "report": self._report,
            "error": self._problem,
            "alarms": [asdict(alarm) for alarm in alarms],
            "rate_bytes_per_s": self._rate_now,
            "mean_bytes_per_s": sent / spent_s if spent_s else None,
            "sample": last and last[:4],
            "max_age_s": self._max_age_s,
        }

    def history(self) -> list[tuple[float, float, float, int]]:
        """Return by time, in seconds since the epoch: bytes per second to the object tier, and bytes and files queued."""
        return [sample[:4] for sample in list(self._history)]

    def checkpoints(self, since: int | None) -> dict[str, Any]:
        """Return the rows that changed after a version of the list; all rows, and up to date, for ``None``."""
        self.watch()
        if since is None and time.monotonic() - self._listed_s > self._list_every_s:
            self._has_listed.clear()
            self._turn.set()
            self._has_listed.wait()
        return {**self.list.changes(since or 0), "problem": self._list_problem}

    @property
    def _list_every_s(self) -> float:
        return max(LIST_S_MIN, LIST_SHARE * self._cost_s)

    @property
    def _is_watched(self) -> bool:
        return time.monotonic() - self._watched_s < WATCHED_S

    def _keep_polling(self) -> None:
        while not self._is_closed:
            self._poll()
            waited_s = 0.0
            while waited_s < (POLL_S if self._is_watched else IDLE_POLL_S) and not self._is_closed:
                time.sleep(POLL_S)
                waited_s += POLL_S

    def _poll(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            try:
                store = self.open().store
                report = status(store)
                published = report["counters"].get("flusher_published_files")
                age_s = now_s - self._condition_s
                if age_s >= CONDITION_S or (published != self._published and age_s >= CONDITION_S_MIN):
                    self._condition, self._condition_s, self._published = condition(store), now_s, published
                report |= self._condition
            except (TierfsError, OSError) as error:
                problem = asdict(describe(error))
                if problem != self._problem:
                    _logger.warning("%s: %s", self.url, problem["message"])
                self._problem, self._polled_s = problem, now_s
                self.version += 1
                return
            rate = self._rate.sample(report, now_s) or 0.0
            sent = (self._history[-1][4] if self._history else 0.0) + rate * min(now_s - self._polled_s, IDLE_POLL_S)
            self._history.append((time.time(), rate, report["queue_bytes"], report["queue_files"], sent))
            while self._history[0][0] < time.time() - HISTORY_S:
                self._history.popleft()
            changed = report != self._report or self._problem is not None
            self._report, self._problem, self._rate_now, self._polled_s = report, None, rate, now_s
            self.version += changed or bool(rate)

    def _keep_listing(self) -> None:
        pending: dict[str, Any] = {}
        weighed = 0
        while not self._is_closed:
            self._turn.wait(POLL_S)
            self._turn.clear()
            is_asked = not self._has_listed.is_set()
            if not (self._is_watched or is_asked) or self._is_closed:
                continue
            try:
                place = self.open()
                begun_s, before = time.thread_time(), self.list.version
                now = pending_in(place)
                has_peers = bool(now) and "peers" in (self._report or {})
                changed = {_directory(path) for path, _ in now.items() ^ pending.items()}
                changed |= {_directory(path) for path in now} if has_peers else set()
                if is_asked or time.monotonic() - self._listed_s >= self._list_every_s:
                    begun_s = time.monotonic()
                    self.list.refresh(place, lambda: self._is_closed)
                    self._listed_s = time.monotonic()
                    self._cost_s = self._listed_s - begun_s
                    if self.list.version != weighed:
                        self.list.weigh(place)
                        weighed = self.list.version
                elif changed - {None}:
                    self.list.look_at(place, [path for path in changed if path is not None])
                pending, self._list_problem = now, None
                self.version += self.list.version != before
            except (TierfsError, OSError) as error:
                problem = describe(error).message
                if problem != self._list_problem and self._problem is None:
                    _logger.warning("%s: %s", self.url, problem)
                    self.version += 1
                self._list_problem, self._listed_s = problem, time.monotonic()
            finally:
                self._has_listed.set()


def _directory(path: str) -> str | None:
    """Return the directory of the checkpoint that a pending file belongs to; ``None`` if it belongs to none."""
    directory, _, name = path.rpartition("/")
    if directory.rpartition("/")[2] == PENDING and is_save_id(name):
        return directory[: -len(PENDING)].rstrip("/")
    is_part = name == ROOT or rank_of(name) is not None or name.endswith((".safetensors", ".distcp"))
    return directory if is_part or name.startswith(".") else None
