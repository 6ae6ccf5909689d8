"""Views of staged tensors that follow: a GPU's tensors get their host memory in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from tierfs.device.transfer import Transfer, detached
from tierfs.threads import start_daemon

__all__ = ["Later"]


class Later:
    """Views of what is staged, some of which follow.

    Args:
        views: In order; ``None`` for those that follow.

    Attributes:
        views: As given; complete once `ready` is set, unless there is an error.
        ready: Set when nothing follows any more.
        error: Why some are missing.
        transfers: The transfers that follow.
        fill: Makes what follows.
    """

    def __init__(self, views: Sequence[torch.Tensor | None]) -> None:
        self.views = list(views)
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.transfers: Sequence[Transfer] = ()
        self.fill: Callable[[], None] | None = None
        self.note_progress()

    def note_progress(self) -> None:
        """Set `ready` if all views are there."""
        if all(view is not None for view in self.views):
            self.ready.set()

    def begin(self) -> None:
        """Have made in the background what follows. Last, since Python on two threads is slower than on one."""
        fill, self.fill = self.fill, None
        if fill is not None and start_daemon(fill, name="device-drain") is None:
            fill()

    def discard(self) -> None:
        """Give up what follows and was not begun."""
        if self.fill is not None:
            self.fill = None
            for transfer in self.transfers:
                transfer.discard()

    def result(self) -> list[torch.Tensor]:
        """All views, waiting for those that follow. Their bytes are another matter: see `ShardFile.wait_filled`.

        Raises:
            TierfsError: They could not be made.
        """
        self.ready.wait()
        if self.error is not None:
            raise detached(self.error)
        return [view for view in self.views if view is not None]
