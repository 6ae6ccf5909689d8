"""Process a few files at a time on the command's own threads.

The threads of `tierfs.threads` transfer chunks. A task for a file waits for its chunks, so it runs elsewhere.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tierfs.cli.terminal.progress import Progress

_Item = TypeVar("_Item")

FILES_AT_ONCE = 4


class Stopped(Exception):  # noqa: N818 - not an error
    """Raised inside a task to end it early, because another task failed or the user interrupted the command."""


def run_in_parallel(
    task: Callable[[_Item, threading.Event], object], items: Iterable[_Item], progress: Progress | None = None
) -> None:
    """Call ``task(item, stop)`` for every item, `FILES_AT_ONCE` at a time.

    Args:
        task: Raises `Stopped` at a suitable point once ``stop`` is set.
        items: Listed before the first call.
        progress: Shows the number of finished items; None for no progress.

    Raises:
        BaseException: The first error of a task, raised when every task that had begun has ended.
    """
    todo = list(items)
    stop = threading.Event()
    if len(todo) < 2:  # noqa: PLR2004 - one item needs no thread
        for item in todo:
            task(item, stop)
        return
    done = itertools.count(1)
    errors: list[BaseException] = []

    def work(item: _Item) -> None:
        if stop.is_set():
            return
        try:
            task(item, stop)
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            stop.set()
        if progress is not None:
            progress.note(f"{next(done)} of {len(todo)}")

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="tierfs-file") as pool:
        try:
            list(pool.map(work, todo))
        finally:
            stop.set()
    if errors:
        raise errors[0]
