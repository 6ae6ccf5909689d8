"""The flusher's answers to the processes of its host: messages in, plain values out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tierfs.errors import InvalidInputError
from tierfs.flusher.access import Way
from tierfs.flusher.flusher import Flusher
from tierfs.flusher.queue import FlushItem
from tierfs.flusher.server import Peer
from tierfs.flusher.upkeep import Upkeep, UpkeepPolicy
from tierfs.format.keys import is_at_or_below
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import SlotRef

if TYPE_CHECKING:
    from tierfs.store.store import Store

__all__ = ["FlushEngine"]

_Work: TypeAlias = "Callable[[], dict[str, Any] | None]"


class FlushEngine:
    """A flusher behind messages. Safe for use by many threads.

    Args:
        build: Makes what does the work; called by `start`, when nobody else works on these tiers.
    """

    def __init__(self, build: Callable[[], Flusher]) -> None:
        self._build = build
        self._upkeep: Upkeep | None = None
        self._started: Flusher | None = None

    def __repr__(self) -> str:
        return f"FlushEngine({self._started!r})"

    @property
    def _flusher(self) -> Flusher:
        assert self._started is not None, "not started"
        return self._started

    def keep_up(self, open_store: Callable[[], Store], policy: UpkeepPolicy) -> None:
        """Collect garbage and scrub in the background as well, from `start` on. Called before that."""

        def count(name: str, more: int) -> None:
            self._flusher.note(name, more)  # which is made when it starts

        self._upkeep = Upkeep(open_store, policy, count)

    def start(self) -> None:
        """Begin to work. Only the flusher that holds the lock is started.

        Raises:
            StoreError, CapacityError, ReadOnlyError: A local tier cannot be opened.
        """
        self._started = self._build()
        try:
            self._started.start()
            if self._upkeep is not None:
                self._upkeep.start()
        except BaseException:
            self._started.stop()
            self._started.close()
            raise

    def stop(self) -> None:
        """Have every `handle` under way end soon, and come to rest otherwise; see `Flusher.stop`.

        An error that a `handle` raises from now on reaches nobody: its client asks the next flusher.
        """
        if self._upkeep is not None:
            self._upkeep.stop()
        self._flusher.stop()

    def close(self) -> None:
        """Release the tiers. Called after `stop`, when no `handle` is under way and none will be."""
        self._flusher.close()

    def is_idle(self) -> bool:
        """Whether there is nothing left to do; see `Flusher.is_idle`."""
        return self._flusher.is_idle()

    def gone(self, peer: Peer) -> None:
        """End what a client waits for, since it hung up. Does not block.

        Called when its last request has returned, and before that if one is under way: perhaps twice.
        """
        self._flusher.nudge()

    def handle(self, do: str, arguments: dict[str, Any], peer: Peer) -> dict[str, Any]:
        """Do what a client asks; may take as long as it takes. Returns what JSON holds, within a message.

        Args:
            do: The request; "hello" comes first on each connection.
            arguments: From the client; checked by nobody yet.
            peer: The client. When it hangs up nobody waits for the answer: see `gone`.

        Raises:
            InvalidInputError: The message is not understood.
            TierfsError, TimeoutError: Raised again at the client. Anything else becomes a StoreError there.
        """
        method = getattr(self, f"_do_{do}", None)
        if method is None:
            raise InvalidInputError(f"the flusher knows no {do!r}")
        try:
            work = method(arguments, peer)
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"{do!r} was sent with bad arguments: {error!r}") from error
        return work() or {}

    # Each reads its arguments and returns the work, in which the same errors are no fault of the client's.

    def _do_hello(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        options = arguments.get("options")
        if options is None:
            return lambda: None
        way = Way(str(arguments.get("url")), options, bool(arguments.get("writes")))
        return lambda: self._flusher.hand_over(way)

    def _do_draft(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        """Something was sealed."""
        return self._flusher.nudge

    def _do_wait(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        path = str(arguments.get("path") or "")
        write_id = bytes.fromhex(arguments["write_id"]) if "write_id" in arguments else None
        level, timeout_s = Level.parse(arguments["level"]), arguments.get("timeout_s")

        def selects(entry: FlushItem) -> bool:
            if write_id is not None:
                return entry.draft.write_id == write_id
            return is_at_or_below(entry.path, path)

        def wait() -> dict[str, Any]:
            known = self._flusher.wait(selects, level, timeout_s, peer.gone.is_set, write_id=write_id, path=path)
            return {"known": known}

        return wait

    def _do_status(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        return lambda: {"pid": os.getpid(), **self._flusher.report()}

    def _do_backfill(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        references = _references(arguments)
        return lambda: self._flusher.persister.backfill(references)

    def _do_ahead(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        references, length = _references(arguments), int(arguments["length"])
        return lambda: self._flusher.persister.write_ahead(references, length)

    def _do_spill(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        holder, timeout_s, references = str(arguments["holder"]), arguments["timeout_s"], _references(arguments)
        return lambda: self._flusher.persister.spill(holder, references, timeout_s)

    def _do_unhold(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        nvme, holder = self._flusher.nvme, str(arguments["holder"])
        return (lambda: None) if nvme is None else (lambda: nvme.drop_hold(holder))

    def _do_evict(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        nvme, names = self._flusher.nvme, arguments.get("names")
        wanted = None if names is None else [bytes.fromhex(name) for name in names]
        return lambda: {"bytes": 0 if nvme is None else nvme.evict(wanted)}

    def _do_quarantine(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        name, length = bytes.fromhex(arguments["name"]), int(arguments["length"])
        return lambda: self._flusher.persister.look_after(name, length)

    def _do_report_damage(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        key = str(arguments["key"])
        return lambda: self._flusher.report_damage(key)

    def _do_discard(self, arguments: dict[str, Any], peer: Peer) -> _Work:
        path = str(arguments["path"])
        return lambda: {"discarded": self._flusher.discard(path)}


def _references(arguments: dict[str, Any]) -> list[SlotRef]:
    return [SlotRef(*each) for each in arguments["slots"]]
