"""Threads that do something on the side, and that nobody waits for when the program ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["start_daemon"]


def start_daemon(task: Callable[..., object], *arguments: object, name: str) -> threading.Thread | None:
    """Run ``task(*arguments)`` on a daemon thread of this name.

    Returns:
        The thread; ``None`` if there can be none: an interpreter that is about to end starts no more (from Python 3.12 on), though
        saves on other threads still run, and neither does one without memory for it.
    """
    thread = threading.Thread(target=task, args=arguments, name=f"tierfs-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
