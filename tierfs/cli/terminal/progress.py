"""Progress on stderr: bytes, rate and time left."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from tierfs.units import format_bytes

if TYPE_CHECKING:
    import rich.progress as bars

FIRST_S = 1.0  # a shorter command shows nothing and does not import rich, unless --progress is given
TERMINAL_S, FILE_S = 0.1, 10.0  # between two drawings; in a file, each one stays
_lock = threading.RLock()  # held while writing to stderr and while counting
_shown: list[bars.Progress] = []


def print_above(text: str) -> None:
    """Print a line on stderr that no progress overwrites."""
    with _lock:
        if _shown:
            _shown[-1].console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


class Progress:
    """Counts bytes and can show progress. Thread-safe.

    Args:
        label: The name of the command or action.
        total_bytes: Expected bytes, or None if unknown.
        wanted: Whether to show progress. None: only if stderr is a terminal, and after a second.

    Attributes:
        bytes: Bytes counted so far.
        is_shown: Whether progress is shown, now or later.
    """

    def __init__(self, label: str, *, total_bytes: int | None = None, wanted: bool | None = None) -> None:
        is_terminal = sys.stderr.isatty()
        self.bytes = 0
        self.is_shown = is_terminal if wanted is None else wanted
        self._label, self._total_bytes, self._note = label, total_bytes, ""
        self._overwrites = is_terminal and os.environ.get("TERM") != "dumb"
        self._first_s = 0.0 if wanted else FIRST_S
        self._began_s = self._now_s = time.monotonic()
        self._bar: bars.Progress | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierfs-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self.is_shown:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_shown:
            self._ended.set()
            self._thread.join()
            if time.monotonic() - self._began_s >= self._first_s:
                self._show(is_last=True)

    def expect(self, total_bytes: int) -> None:
        """Set the expected number of bytes."""
        self._total_bytes = total_bytes

    def note(self, text: str) -> None:
        """Show a few words after the numbers."""
        self._note = text

    def advance(self, count: int) -> None:
        with _lock:
            self.bytes += count

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._ended.wait(wait_s):
            self._show()
            wait_s = TERMINAL_S if self._overwrites else FILE_S

    def _show(self, *, is_last: bool = False) -> None:
        # The work must go on after the terminal is closed.
        with _lock, contextlib.suppress(OSError):
            bar = self._bar = self._bar or self._begin()
            line = self._update(bar)
            if bar in _shown and not is_last:
                bar.refresh()
                return
            if bar in _shown:
                _shown.remove(bar)
                bar.stop()
            if not is_last or self.bytes or self._total_bytes or self._note:
                print_above(line)

    def _begin(self) -> bars.Progress:
        """Make a bar that measures time from the start of the command."""
        import rich.progress as bars  # noqa: PLC0415 - 50 ms, for long commands only
        from rich.console import Console  # noqa: PLC0415

        columns = bars.BarColumn(20), bars.TextColumn("{task.description}", markup=False)
        to = Console(file=sys.stderr, force_terminal=True, force_interactive=True)
        how = {"auto_refresh": False, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
        bar = bars.Progress(*columns, console=to, get_time=lambda: self._now_s, **how)
        bar.advance(bar.add_task(self._label, total=self._total_bytes or None), 0)
        if self._overwrites:
            bar.start()
            _shown.append(bar)
        return bar

    def _update(self, bar: bars.Progress) -> str:
        """Update the bar, and return the line that is shown beside it."""
        (task,), total = bar.tasks, self._total_bytes or None
        self._now_s = time.monotonic()
        bar.update(task.id, completed=self.bytes, total=total)
        facts = [f"{task.percentage:.0f}%"] if total else []
        if total or self.bytes:
            facts.append(format_bytes(self.bytes) + (f"/{format_bytes(total)}" if total else ""))
        if task.speed:
            facts.append(f"{format_bytes(int(task.speed))}/s")
        left_s = task.time_remaining
        facts.append(f"{timedelta(seconds=left_s or int(task.elapsed or 0))}{' left' if left_s else ''}")
        line = f"{self._label}: {', '.join(filter(None, [*facts, self._note]))}"
        bar.update(task.id, description=line)
        return line
