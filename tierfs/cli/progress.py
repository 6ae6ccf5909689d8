"""Progress on stderr: bytes, rate and time left."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from types import TracebackType

from tierfs.units import format_bytes

__all__ = ["Progress", "add_progress_argument", "print_above"]

FIRST_S = 1.0  # a command that takes less shows nothing, unless it is asked to
TERMINAL_S, FILE_S = 0.1, 10.0  # from one line to the next; in a file each stays
BAR_WIDTH = 20
_lock = threading.RLock()
_shown: list[Progress] = []


def add_progress_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--progress`` and ``--no-progress``."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show progress on stderr (default: if stderr is a terminal, after a second)",
    )


def print_above(text: str) -> None:
    """Print a line on stderr that no progress overwrites."""
    with _lock:
        for progress in _shown:
            progress.erase()
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Counts bytes, and shows them if that is wanted. Safe for use by many threads.

    Args:
        label: The name of the command or action.
        total_bytes: How many there will be, if that is known.
        wanted: Whether to show progress; ``None`` for "if stderr is a terminal, after a second".

    Attributes:
        bytes: Counted so far.
        is_shown: Whether it is, or will be, shown.
    """

    def __init__(self, label: str, *, total_bytes: int | None = None, wanted: bool | None = None) -> None:
        is_terminal = sys.stderr.isatty()
        self.bytes = 0
        self.is_shown = is_terminal if wanted is None else wanted
        self._label = label
        self._total_bytes = total_bytes
        self._note = ""
        self._overwrites = is_terminal and os.environ.get("TERM") != "dumb"
        self._first_s = 0.0 if wanted else FIRST_S
        self._began_s = time.monotonic()
        self._width = 0  # of the line that the next one overwrites
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierfs-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self.is_shown:
            _shown.append(self)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_shown:
            return
        self._ended.set()
        self._thread.join()
        with _lock:
            _shown.remove(self)
            if time.monotonic() - self._began_s < self._first_s:
                return
            if self.bytes or self._total_bytes or self._note:
                self._draw()
                self._write("\n" if self._overwrites else "")
            else:
                self.erase()

    def expect(self, total_bytes: int) -> None:
        """Say how many bytes there will be."""
        self._total_bytes = total_bytes

    def note(self, text: str) -> None:
        """Show a few words behind the numbers."""
        self._note = text

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes."""
        with _lock:
            self.bytes += count

    def erase(self) -> None:
        """Empty the line on the terminal; the next drawing fills it again."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._ended.wait(wait_s):
            with _lock:
                self._draw()
            wait_s = TERMINAL_S if self._overwrites else FILE_S

    def _draw(self) -> None:
        text = self._line()
        if self._overwrites:
            with contextlib.suppress(OSError):  # no terminal after all
                columns = os.get_terminal_size(sys.stderr.fileno()).columns
                text = text[: columns - 1] if columns else text
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._write(text + "\n")

    @staticmethod
    def _write(text: str) -> None:
        # A terminal that is gone must not end the work.
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def _line(self) -> str:
        passed_s, total = time.monotonic() - self._began_s, self._total_bytes
        speed = self.bytes / passed_s if passed_s else 0.0
        line, facts = f"{self._label}: ", []
        if total:
            share = min(self.bytes / total, 1.0)
            full = int(share * BAR_WIDTH)
            mark = "█" if "utf" in (sys.stderr.encoding or "").lower() else "#"
            line += f"{share:.0%} {mark * full}{'.' * (BAR_WIDTH - full)} "
            facts.append(f"{format_bytes(self.bytes)}/{format_bytes(total)}")
        elif self.bytes:
            facts.append(format_bytes(self.bytes))
        if self.bytes:
            facts.append(f"{format_bytes(int(speed))}/s")
        is_going = total and speed and self.bytes < total
        facts.append(f"{_clock((total - self.bytes) / speed)} left" if total and is_going else _clock(passed_s))
        return line + ", ".join([*facts, self._note] if self._note else facts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"  # noqa: PLR2004 - in an hour
