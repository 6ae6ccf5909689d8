"""The way to the flusher, as users of the local tiers need it; `tierfs.host.rpc.client` implements it."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Caller", "NoAnswerError"]


class NoAnswerError(TimeoutError):
    """The flusher did not answer in time: it is stopped, hangs, or cannot be started. Its own answers are no such error."""


class Caller(Protocol):
    """How the flusher is reached; `FlusherClient` is one."""

    def request(
        self,
        do: str,
        arguments: dict[str, Any],
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a message and return the answer; starts a flusher where none runs.

        Raises:
            NoAnswerError: No answer in time.
            StoreError: No flusher can be reached or started.
            TierfsError: From the flusher's answer.
        """

    def is_running(self) -> bool:
        """Whether a flusher runs now."""

    def close(self) -> None:
        """Ask nothing any more."""
