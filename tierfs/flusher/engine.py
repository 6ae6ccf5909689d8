"""Build a store's flusher and answer its clients' requests: a request is a message, its result is plain values.

This module and its imports do not load the object tier, because a flusher answers its clients before that is loaded.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tierfs.clock import Clock, SystemClock
from tierfs.errors import CapacityError, InvalidInputError, StoreError
from tierfs.flusher.access import Connect, Way
from tierfs.flusher.flusher import Flusher
from tierfs.flusher.priority import Priority
from tierfs.flusher.upkeep import Upkeep
from tierfs.host.events import Faults, no_faults
from tierfs.host.host import Host
from tierfs.host.nvme.head import BUDGET_BYTES_MIN, read_budget
from tierfs.host.nvme.tier import NvmeTier, has_tier, is_needed
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import SlotRef
from tierfs.host.slab.budget import TRANSIT_BYTES
from tierfs.host.slab.ram import RamTier

if TYPE_CHECKING:
    from tierfs.flusher.exchange import DraftExchange
    from tierfs.flusher.publish import StorePublisher
    from tierfs.flusher.state import FlushState
    from tierfs.host.events import Counters
    from tierfs.host.rpc.client import FlusherClient
    from tierfs.host.tiers import RemoteDrafts

_Work: TypeAlias = "Callable[[], dict[str, Any] | None]"


class Client:
    """The sender of a request.

    Attributes:
        number: Unique among all connections to this flusher.
        pid: The client's process id, or 0 if the client is in another PID namespace. For display only.
        version: The client's version of tierfs. Empty before the hello.
        gone: Set when the client has hung up, before the service calls `FlushEngine.gone`.
    """

    def __init__(self, number: int, pid: int) -> None:
        self.number, self.pid, self.version = number, pid, ""
        self.gone = threading.Event()


class FlushEngine:
    """Runs requests on a flusher. Thread-safe.

    Args:
        build: Makes the flusher. `start` calls it when no other process writes these tiers.
    """

    def __init__(self, build: Callable[[], Flusher]) -> None:
        self._build = build
        self._upkeep: Upkeep | None = None
        self._started: Flusher | None = None

    @property
    def _flusher(self) -> Flusher:
        assert self._started is not None, "not started"
        return self._started

    def keep_up(self, upkeep: Upkeep) -> None:
        """Also collect garbage and scrub in the background. Call this before `start`, which starts the upkeep."""
        self._upkeep = upkeep

    def start(self) -> None:
        """Build the flusher and start it. The caller holds the lock of the store's flusher.

        Raises:
            StoreError, CapacityError, ReadOnlyError: A local tier cannot be opened.
        """
        self._started = self._build()
        try:
            self._started.start()
            if self._upkeep is not None:
                self._upkeep.counters = self._started.counters
                self._upkeep.start()
        except BaseException:
            self._started.stop()
            self._started.close()
            raise

    def stop(self) -> None:
        """Stop the flusher, and make running `handle` calls end soon; see `Flusher.stop`.

        The client of a `handle` call that fails from now on asks the next flusher instead.
        """
        if self._upkeep is not None:
            self._upkeep.stop()
        self._flusher.stop()

    def close(self) -> None:
        """Release the tiers. Call this after `stop`, when no `handle` call is running or will follow."""
        self._flusher.close()

    def is_idle(self) -> bool:
        return self._flusher.is_idle()

    def gone(self, client: Client) -> None:
        """End the request of a client that has hung up. Does not block.

        The service calls this during a running request, if there is one, and again after the last request. So there may
        be two calls.
        """
        self._flusher.nudge()

    def handle(self, do: str, arguments: dict[str, Any], client: Client) -> dict[str, Any]:
        """Run a client's request, without a time limit. Return values that JSON can hold and that fit in one message.

        Args:
            do: The request. "hello" is the first on each connection.
            arguments: The client's arguments, not validated yet.
            client: The client. It may hang up meanwhile: see `gone`.

        Raises:
            InvalidInputError: The request is unknown, or its arguments are invalid.
            TierfsError, TimeoutError: The request failed. The client raises the same error. Any other exception becomes
                a StoreError at the client.
        """
        try:
            work = self._work(do, arguments, client)
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"{do!r} was sent with bad arguments: {error!r}") from error
        return work() or {}

    def _work(self, do: str, arguments: dict[str, Any], client: Client) -> _Work:
        """Parse the arguments of a request, and return its work.

        A KeyError or TypeError here is the client's mistake; in the returned function it is ours.
        """
        flusher, nvme = self._flusher, self._flusher.nvme
        match do:
            case "hello":
                options, codecs = arguments.get("options"), arguments.get("codecs")
                way = (
                    None if options is None else Way(str(arguments.get("url")), options, bool(arguments.get("writes")))
                )
                return lambda: flusher.hand_over(way, codecs)
            case "draft":  # a client has sealed one
                return flusher.nudge
            case "wait":
                where = str(arguments.get("path") or "")
                write_id = bytes.fromhex(arguments["write_id"]) if "write_id" in arguments else None
                level, limit_s = Level.parse(arguments["level"]), arguments.get("timeout_s")
                return lambda: {"known": flusher.wait(where, level, limit_s, write_id=write_id, gone=client.gone)}
            case "status":
                return lambda: {"pid": os.getpid(), **flusher.report()}
            case "backfill":
                references = _references(arguments)
                return lambda: flusher.persister.backfill(references)
            case "ahead":
                references, length = _references(arguments), int(arguments["length"])
                return lambda: flusher.persister.write_ahead(references, length)
            case "evict":
                names = arguments.get("names")
                wanted = None if names is None else [bytes.fromhex(name) for name in names]
                return lambda: {"bytes": 0 if nvme is None else nvme.evict(wanted)}
            case "quarantine":
                name, length = bytes.fromhex(arguments["name"]), int(arguments["length"])
                return lambda: flusher.persister.look_after(name, length)
            case "report_damage":
                key = str(arguments["key"])
                return lambda: flusher.report_damage(key)
            case "peers":
                return lambda: {} if flusher.exchange is None else flusher.exchange.hosts()
            case "discard":
                path = str(arguments["path"])
                return lambda: {"discarded": flusher.discard(path)}
            case _:
                raise InvalidInputError(f"unknown flusher request {do!r}")


class Replication(Protocol):
    """The settings of a satellite that holds changes on other hosts."""

    def arguments(self) -> list[str]:
        """Return these settings as arguments of ``tierfs flusher run``."""

    def remote(
        self, directory: Path, store: str, flusher: FlusherClient, counters: Counters, clock: Clock, *, is_near: bool
    ) -> RemoteDrafts:
        """Return the tier of what other hosts hold. ``is_near`` says whether the object tier is on this host."""

    def exchange(self, state: FlushState, host: Host, store: str) -> DraftExchange:
        """Return this host's part. Raises a `TierfsError` if it cannot take part."""


def _references(arguments: dict[str, Any]) -> list[SlotRef]:
    return [SlotRef(*each) for each in arguments["slots"]]


_logger = logging.getLogger("tierfs.flush")


def build_engine(
    host: Host,
    uuid: str,
    connect: Connect | None,
    *,
    ram_bytes: int,
    nvme_bytes: int,
    bandwidth: int,
    own: Way | None = None,
    publisher: StorePublisher | None = None,
    clock: Clock | None = None,
    faults: Faults = no_faults,
    priority: Priority | None = None,
    replication: Replication | None = None,
) -> FlushEngine:
    """Build the engine of a flusher, to be run by a `Service`.

    Args:
        connect: Makes the publisher from the `Way` that a client hands over. The flusher waits for a client's way
            unless ``own`` is given.
        ram_bytes: The budget of the ram tier; 0 if that is off.
        nvme_bytes: The budget of the nvme tier; 0 if that is off.
        bandwidth: Most bytes of encoded chunks per second to the object tier; 0 for no bound.
        own: A way to the object tier that is used until a client hands over a better one.
        publisher: Publishes to the store if there is no ``connect``.
        faults: Called before and after each ordered step.
        priority: How the flusher shares the processors. By default, it keeps the priority of this process.
        replication: The settings of replication to other hosts; ``None`` if it is off.
    """
    clock = clock or SystemClock()

    def build() -> Flusher:
        nvme, problem = _nvme_tier(host.store_directory(uuid), nvme_bytes, clock, faults)
        ram = RamTier(host, uuid, budget_bytes=ram_bytes or TRANSIT_BYTES, clock=clock)
        flusher = Flusher(
            ram,
            nvme,
            clock=clock,
            random=random.random,
            bandwidth=bandwidth,
            faults=faults,
            connect=connect,
            nvme_problem=problem,
            priority=priority,
        )
        if problem:
            flusher.counters["nvme_unavailable"] += 1
        if priority is not None and priority.is_refused:
            flusher.counters["priority_refused"] += 1
        if publisher is not None:
            flusher.use(publisher)
        if own is not None:
            flusher.hand_over(own)
        if replication is not None:
            flusher.join(lambda state: replication.exchange(state, host, uuid))
        return flusher

    return FlushEngine(build)


def _nvme_tier(directory: Path, budget_bytes: int, clock: Clock, faults: Faults) -> tuple[NvmeTier | None, str]:
    """Open the nvme tier if it is on, or if it was switched off and still has drafts.

    Returns:
        The tier or None, and the reason why a tier that is on could not be opened, else an empty string.
    """
    if not budget_bytes and not has_tier(directory):
        return None, ""
    try:
        before_bytes = read_budget(directory) or BUDGET_BYTES_MIN
        tier = NvmeTier(directory, budget_bytes=budget_bytes or before_bytes, clock=clock, faults=faults)
    except (CapacityError, StoreError) as error:
        if is_needed(directory):
            raise
        _logger.warning("the nvme tier cannot be used; pending changes go from memory to the object tier: %s", error)
        return None, str(error) if budget_bytes else ""
    return (tier, "") if budget_bytes or tier.drafts() else (None, "")
