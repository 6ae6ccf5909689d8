"""A progress bar on stderr."""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from types import TracebackType
from typing import Any

from tierfs.units import format_bytes

__all__ = ["Progress", "add_progress_argument"]


def add_progress_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--progress`` and ``--no-progress``."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a progress bar on stderr (default: if stderr is a terminal)",
    )


@functools.cache
def _bar_type() -> Any:
    from tqdm import tqdm  # noqa: PLC0415 - only where a bar is shown

    class Bar(tqdm):  # type: ignore[misc]
        """Writes sizes with their units, as everything else does; tqdm writes 64.0M beside MB/s for the same bytes."""

        @property
        def format_dict(self) -> dict[str, Any]:
            values = dict(super().format_dict)
            speed = values["rate"] or (values["n"] / values["elapsed"] if values["elapsed"] else None)
            values["size"] = format_bytes(values["n"])
            values["speed"] = "?" if speed is None else f"{format_bytes(int(speed))}/s"
            if values["total"]:
                values["whole"] = format_bytes(values["total"])
                values["bar_format"] = "{l_bar}{bar}| {size}/{whole} [{elapsed}<{remaining}, {speed}{postfix}]"
            else:
                values["bar_format"] = "{desc}: {size} [{elapsed}, {speed}{postfix}]"
            return values

    return Bar


class Progress:
    """Counts bytes, and shows them if that is wanted. Safe for use by many threads.

    Args:
        label: What is happening.
        total_bytes: How many there will be, if that is known.
        wanted: Whether to show a bar; ``None`` for "if stderr is a terminal".
    """

    def __init__(self, label: str, *, total_bytes: int | None, wanted: bool | None) -> None:
        self.bytes = 0
        self._label = label
        self._total_bytes = total_bytes
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._lock = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._wanted:
            self._bar = _bar_type()(desc=self._label, total=self._total_bytes, file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def is_shown(self) -> bool:
        """Whether there is a bar."""
        return self._bar is not None

    def expect(self, total_bytes: int) -> None:
        """Say how many bytes there will be."""
        with self._lock:
            if self._bar is not None:
                self._bar.reset(total_bytes)
                self._bar.update(self.bytes)

    def note(self, text: str) -> None:
        """Show a few words behind the bar."""
        with self._lock:
            if self._bar is not None:
                self._bar.set_postfix_str(text)

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes."""
        with self._lock:
            self.bytes += count
            if self._bar is not None:
                self._bar.update(count)
