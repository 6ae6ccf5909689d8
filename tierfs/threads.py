"""Background threads that do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_daemon(task: Callable[..., object], *arguments: object, name: str) -> threading.Thread | None:
    """Run ``task(*arguments)`` on a daemon thread of this name.

    Returns:
        The thread; ``None`` if none can start. From Python 3.12 on, an exiting interpreter starts no threads, though
        saves on other threads may still run. A process without memory for a thread starts none either.
    """
    thread = threading.Thread(target=task, args=arguments, name=f"tierfs-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
