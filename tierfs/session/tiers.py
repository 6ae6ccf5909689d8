"""Compose the local tiers of a store on this host, and the flusher behind them, once per process and store.

A flusher is a separate process, started as ``tierfs flusher run``. It is a thread of this process if a
process cannot do the work: because the object tier belongs to this process alone, or because its options cannot be sent
to another process. Both are reached over the same socket, so callers see no difference.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierfs import __version__
from tierfs.clock import Clock, SystemClock
from tierfs.digest import DigestKind
from tierfs.errors import InvalidInputError, StoreError, TierfsError
from tierfs.host.filesystems import filesystem_of, is_durable
from tierfs.host.host import Host
from tierfs.host.local_state import PLACE_FILE, check, claim, use
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.rpc.launch import LOG_NAME, Launched, spawn
from tierfs.host.slab.budget import TRANSIT_BYTES
from tierfs.host.slab.ram import RamTier
from tierfs.host.tiers import Tiers
from tierfs.satellites import COMMAND_LINE
from tierfs.session.exit import finish_at_exit
from tierfs.session.settings import ResolvedTiers, ranks_here
from tierfs.store.store import Store
from tierfs.threads import start_daemon

if TYPE_CHECKING:
    from tierfs.flusher.publish import StorePublisher
    from tierfs.flusher.server import Service

LINGER_S = 10.0
GREET_S = 1.0
"""How long a write waits until a running flusher knows the codecs that it asks for."""
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class TieredStore:
    """The store of the local tiers, as a flusher in another process needs it.

    Attributes:
        uuid: The store's id.
        url: URL of the root in the object tier, without credentials.
        places: See `tierfs.objects.ObjectTier.places`.
        options: For the object tier's filesystem. Never shown, since they may hold secrets.
        kind: The store's digests.
        host_local: Whether the object tier is a directory of this host.
        process_local: Whether the object tier belongs to this process alone.
    """

    uuid: str
    url: str
    places: tuple[str, ...]
    options: dict[str, Any] = field(repr=False)
    kind: DigestKind
    host_local: bool
    process_local: bool


def home_of(target: TieredStore, settings: ResolvedTiers) -> tuple[Host, Path, int]:
    """Return the host of a store's local tiers, their directory on it, and the descriptor that keeps it there.

    Raises:
        InvalidInputError: The directory belongs to another store of this id, or the state directory is in a place that
            cannot hold local tiers.
        DamagedPlaceError: The directory's file that names its store is damaged.
        ReadOnlyError, CapacityError, StoreError: The state directory cannot be used.
    """
    host = Host(settings.directory)
    while True:
        directory = claim(host, target.uuid, target.places, target.url)
        used = use(directory)
        if used is not None:
            return host, directory, used


def may_hide(error: TierfsError, uuid: str, settings: ResolvedTiers) -> bool:
    """Return whether changes of this store may be pending where `home_of` raised this error."""
    if isinstance(error, InvalidInputError):
        return False
    try:
        # This file is written before any local tiers are made.
        return (settings.directory / "stores" / uuid / PLACE_FILE).stat().st_uid == os.geteuid()
    except OSError:
        return False


def tiers_for(
    target: TieredStore,
    settings: ResolvedTiers,
    connect: Callable[[], Store],
    home: tuple[Host, Path, int],
    *,
    resumes: bool = True,
) -> Tiers:
    """Make this process's part of a store's local tiers.

    ``connect`` opens the store without local tiers, for a flusher that is a thread. ``resumes`` says whether to start a
    flusher if changes are pending.
    """
    clock = SystemClock()
    host, directory, used = home
    launcher = Launcher(target, settings, host, directory, connect, clock)
    tiers = Tiers(
        RamTier(host, target.uuid, budget_bytes=settings.ram_bytes or TRANSIT_BYTES, clock=clock),
        NvmeReader(directory),
        LaunchingClient(directory, launcher, used),
        kind=target.kind,
        has_nvme=bool(settings.nvme_bytes),
        gives_local=is_durable(filesystem_of(directory)),
        keeps_reads=bool(settings.ram_bytes) and (target.process_local or not target.host_local),
        shares_reads=ranks_here() > 1,
        passes_by=target.host_local and not settings.nvme_bytes,
        clock=clock,
        problems=settings.problems,
    )
    if settings.replication is not None:
        where = directory, target.uuid, tiers.flusher, tiers.counters, clock
        tiers.join(settings.replication.remote(*where, is_near=target.host_local))
    for tier, problem in settings.problems.items():
        # The text has the disk's free space, which changes all the time.
        _logger.warning("%s: %s", target.url, problem, extra={"repeat_of": f"{target.url}: {tier}"})
    finish_at_exit(tiers, target.url)
    if resumes and tiers.drafts.pending_below(""):
        # The changes were left by processes that ended. Opening the store need not wait for the flusher to start.
        start_daemon(tiers.writer.announce, name="resume")
    return tiers


def publisher_of(connect: Callable[[], Store], host: Host) -> StorePublisher:
    """Return the publisher of this host's pending changes.

    It refuses a copy of the store: it publishes only to the store that the local tiers belong to.
    """
    from tierfs.flusher.publish import StorePublisher  # noqa: PLC0415 - a client needs no flusher's modules

    directory_of = host.store_directory
    return StorePublisher(connect, lambda at: check(directory_of(at.descriptor.uuid), at.objects.places(), at.url))


class Launcher:
    """Starts a flusher for this process: as a process, or as a thread if a process cannot do the work."""

    def __init__(
        self,
        target: TieredStore,
        settings: ResolvedTiers,
        host: Host,
        directory: Path,
        connect: Callable[[], Store],
        clock: Clock,
    ) -> None:
        self._target = target
        self._settings = settings
        self._host = host
        self._directory = directory
        self._connect = connect
        self._clock = clock
        self.fallbacks = 0
        self._lock = threading.Lock()
        # The options as JSON values, whether something was changed with them, and the codecs that a writer asked for.
        self._handed_over: tuple[dict[str, Any] | None, bool] = (None, False)
        self._codecs: str | None = None
        self.hand_over(target.options, writes=False)
        self.thread: threading.Thread | None = None
        self._service: Service | None = None
        self._is_stopped = False

    def __repr__(self) -> str:
        return f"Launcher({self._target.url!r}, fallbacks={self.fallbacks})"

    def hello(self) -> dict[str, Any]:
        """Return the greeting for a flusher: the object tier's URL and options, credentials included."""
        options, writes = self._handed_over
        return {"url": self._target.url, "options": options, "writes": writes, "codecs": self._codecs}

    def hand_over(self, options: dict[str, Any], *, writes: bool, codecs: str | None = None) -> bool:
        """Send these options to flushers from the next greeting on. Options that JSON cannot represent are not sent.

        The flusher encodes with the codecs that the newest writer asked for, if it asked.

        Returns:
            Whether the greeting changed.
        """
        before = self._handed_over, self._codecs
        if writes and codecs is not None:
            self._codecs = codecs
        sent = _as_json(options)
        if sent is not None:
            known, wrote = self._handed_over
            self._handed_over = sent, writes or (wrote and sent == known)
        return (self._handed_over, self._codecs) != before

    def launch(self) -> Launched | None:
        """Start a flusher. Return ``None`` if it is a thread."""
        if self._target.process_local or self._handed_over[0] is None:
            self._start_thread("only this process can reach its object tier")
            return None
        settings = self._settings
        argv = [sys.executable, "-m", COMMAND_LINE, "flusher", "run", self._target.url, "--uuid", self._target.uuid]
        argv += ["--state-dir", str(settings.directory), "--ram", str(settings.ram_bytes)]
        argv += ["--nvme", str(settings.nvme_bytes), "--bandwidth", str(settings.bandwidth)]
        argv += ["--codecs", self._codecs or str(settings.codecs)]
        argv += [] if settings.replication is None else settings.replication.arguments()
        try:
            return spawn(argv, self._directory / LOG_NAME)
        except OSError as error:
            self._start_thread(f"no process can be started ({error})")
            return None

    def _start_thread(self, reason: str) -> None:
        from tierfs.flusher.engine import build_engine  # noqa: PLC0415 - needed only without a separate flusher
        from tierfs.flusher.server import Service  # noqa: PLC0415

        if not self.fallbacks:
            _logger.warning("%s is flushed by a thread of this process: %s", self._target.url, reason)
        self.fallbacks += 1
        engine = build_engine(
            self._host,
            self._target.uuid,
            None,
            ram_bytes=self._settings.ram_bytes,
            nvme_bytes=self._settings.nvme_bytes,
            bandwidth=self._settings.bandwidth,
            publisher=publisher_of(self._connect, self._host),
            clock=self._clock,
            replication=self._settings.replication,
        )
        service = Service(engine, self._directory, version=__version__, linger_s=LINGER_S)
        thread = threading.Thread(target=_serve, args=(service,), name="tierfs-flusher", daemon=True)
        with self._lock:
            if self._is_stopped:
                raise StoreError(f"{self._target.url} was closed: no flusher is started for it")
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter is exiting, or has too many threads
                raise StoreError(f"{self._target.url}: no thread can be started to flush it: {error}") from error
            self._service, self.thread = service, thread

    def stop(self) -> None:
        """Stop the flusher after its current steps if it is a thread of this process. Start no thread afterwards."""
        with self._lock:
            self._is_stopped = True
            service, thread = self._service, self.thread
        if service is not None and thread is not None:
            service.stop()
            thread.join()


class LaunchingClient(FlusherClient):
    """The connection to the flusher. Closing it also stops a flusher that is a thread of this process.

    It owns ``used``, the descriptor from `tierfs.host.local_state.use`.
    """

    def __init__(self, directory: Path, launcher: Launcher, used: int) -> None:
        super().__init__(directory, launcher.launch, __version__, launcher.hello)
        self._launcher = launcher
        self._leave = weakref.finalize(self, os.close, used)

    @property
    def ends_with_us(self) -> bool:
        thread = self._launcher.thread
        return thread is not None and thread.is_alive()

    def hand_over(self, options: dict[str, Any], *, writes: bool, codecs: str | None = None) -> None:
        """Send the flusher these options for the object tier, which may be renewed credentials.

        ``writes`` says whether something is changed with them. ``codecs`` are those that the user asked for, if any.
        """
        if self._launcher.hand_over(options, writes=writes, codecs=codecs):
            self.greet_again()
            if writes and codecs is not None and self.is_running():
                with contextlib.suppress(TierfsError, TimeoutError):  # the next request greets, or reports the same
                    self.request("draft", timeout_s=GREET_S)  # the flusher knows the codecs before the change

    def close(self) -> None:
        """Close the connection, and stop a flusher that is a thread of this process."""
        super().close()
        self._launcher.stop()
        self._leave()


def _serve(service: Service) -> None:
    try:
        service.run()
    except TierfsError:
        _logger.exception("the flusher's thread ended: pending changes stay where they are")


def _as_json(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options if JSON preserves them, else ``None``."""
    try:
        copy = json.loads(json.dumps(options))
    except (TypeError, ValueError):
        return None
    return copy if copy == options else None
