"""``tierfs flusher``: run a store's flusher, stop it, and export or discard the changes that it keeps."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tierfs import __version__
from tierfs.cli.arguments import URL, Arguments, add_arguments, command, require_seconds, suggested, without_json
from tierfs.cli.terminal.output import FORMATS, describe, logging_to_stderr, print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    StoreError,
    StoreNotFoundError,
    TierfsError,
    without_passwords,
)
from tierfs.units import format_bytes, parse_size, parse_time

if TYPE_CHECKING:
    from tierfs.flusher.access import Way
    from tierfs.flusher.engine import FlushEngine
    from tierfs.flusher.publish import StorePublisher
    from tierfs.flusher.server import Service
    from tierfs.peers.replication import PeerReplication
    from tierfs.session import Location
    from tierfs.store import Store


LINGER_S = 10.0
STOP_TIMEOUT_S = 60.0
CONDITION_S = 60.0
# Code that visits every possible descriptor is slow if the limit is over a million. 256 clients need no more than this.
DESCRIPTORS_ENOUGH = 65_536
_MEMORY_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_logger = logging.getLogger("tierfs.flush")


def _run_options(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group("tiers")
    tiers.add_argument("--ram", metavar="BYTES", help="budget of the ram tier, like 64GiB")
    tiers.add_argument("--nvme", metavar="BYTES", help="budget of the nvme tier, like 1TiB")
    tiers.add_argument(
        "--bandwidth", metavar="BYTES", help="bytes per second to the object tier, like 500MB (default: no bound)"
    )
    tiers.add_argument("--codecs", metavar="CODECS", help="auto, all, off, or names like zstd,plane (default: auto)")
    peers = parser.add_argument_group("peers", "see docs/reference/peers.md")
    peers.add_argument(
        "--peers", metavar="COUNT", help="hold each change on this many other hosts, 1 to 3 (default: 0)"
    )
    peers.add_argument("--peer-listen", metavar="ADDRESS[:PORT]", help="listen for other hosts at this address")
    peers.add_argument("--peer-domain", metavar="NAME", help="failure domain of this host, for example its rack")
    peers.add_argument("--peer-hosts", metavar="ADDRESS[:PORT],...", help="the other hosts (default: list the store)")
    peers.add_argument("--peer-ram", metavar="BYTES", help="most memory for the changes of other hosts")
    peers.add_argument("--peer-nvme", metavar="BYTES", help="most room on the disk for the changes of other hosts")
    peers.add_argument("--peer-bandwidth", metavar="BYTES", help="bytes per second to other hosts (default: no bound)")
    upkeep = parser.add_argument_group("upkeep")
    add_arguments(
        upkeep,
        {
            "--gc-every TIME": "run gc in the background when the last gc of any host is this long ago, like 6h (default: never)",
            "--scrub-bandwidth BYTES": "verify each chunk about once a week in the background, at this many bytes per second, like 50MB (default: none)",
        },
    )
    process = parser.add_argument_group("process")
    add_arguments(
        process,
        {
            "--linger SECONDS:float": f"end after this time without clients and work (default: never, with --uuid {LINGER_S:g})",
            "--uuid ID": "the store's id, 32 hex digits: the flusher opens the store when a client sends its options. Clients start flushers with this option",
            "--metrics PORT:int": "serve the metrics of `tierfs status --prometheus` at http://127.0.0.1:PORT/metrics",
        },
    )
    process.add_argument(
        "--log-format", choices=list(FORMATS), help="format of the log on stderr (default: by TIERFS_LOG, else logfmt)"
    )


_STORE: list[Arguments] = [URL, {"--state-dir DIRECTORY": "state directory of this host (default: TIERFS_STATE_DIR)"}]
_ACTIONS: dict[str, tuple[str, Sequence[Arguments]]] = {
    "run": ("run the flusher of a store here, until SIGTERM or Ctrl-C", [*_STORE, without_json, _run_options]),
    "stop": ("end the running flusher after its current steps", _STORE),
    "export": (
        "write the change of a file that this host kept after a conflict to a local file",
        [URL, {"file FILE": "the local file to write, which must be new"}, *_STORE[1:]],
    ),
    "discard": (
        "delete the change of a file that this host kept after a conflict or damage; this cannot be undone",
        [*_STORE, {"-r --recursive": "of all files below the path: after each, wait for those that it kept back"}],
    ),
}


@command(
    "flusher",
    "run or stop the background flusher of a store, or handle the changes that it keeps",
    """
    tierfs flusher run tierfs::s3://bucket/run
    tierfs flusher run tierfs::s3://bucket/run --ram 64GiB --log-format json
    tierfs flusher stop tierfs::s3://bucket/run
    tierfs flusher export tierfs::s3://bucket/run/step_1000/config.json ours.json
    tierfs flusher discard tierfs::s3://bucket/run/step_1000/config.json
    tierfs flusher discard -r tierfs::s3://bucket/run/step_1000
    """,
    actions=_ACTIONS,
)
def run(arguments: argparse.Namespace) -> int:
    return {"run": _run, "stop": _stop, "export": _export, "discard": _discard}[arguments.action](arguments)


def _location(arguments: argparse.Namespace) -> Location:
    from tierfs.session import TierOptions, parse_url  # noqa: PLC0415 - a spawned flusher needs it later
    from tierfs.session.settings import PEER_OPTIONS  # noqa: PLC0415

    location = parse_url(arguments.url)
    names = ("ram", "nvme", "state_dir", "bandwidth", "codecs", *PEER_OPTIONS)
    given = TierOptions(**{name: getattr(arguments, name, None) for name in names})
    return replace(location, tiers=given.over(location.tiers))


# -- run ---------------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    spawned = arguments.uuid is not None
    if spawned and (arguments.gc_every or arguments.scrub_bandwidth):
        raise InvalidInputError(
            "--gc-every and --scrub-bandwidth are for a flusher that you run yourself, without --uuid"
        )
    if arguments.metrics is not None and (spawned or arguments.linger is not None):
        raise InvalidInputError("--metrics is for a flusher that stays: give it without --linger and --uuid")
    if spawned and not re.fullmatch("[0-9a-f]{32}", arguments.uuid):
        raise InvalidInputError(f"--uuid {arguments.uuid!r}: give the 32 hex digits that `tierfs status --json` shows")
    linger_s = arguments.linger
    if linger_s is None:
        linger_s = LINGER_S if spawned else math.inf
    require_seconds("--linger", linger_s, may_be_infinite=True)
    # A spawned flusher may run for months, and nobody reads its log regularly: log warnings only.
    level = "warning" if spawned else "info"
    with logging_to_stderr(level=level, format="logfmt", wanted_format=arguments.log_format):
        try:
            engine, directory = _spawned(arguments) if spawned else _sidecar(arguments)
            return _serve(engine, directory, arguments.url, linger_s, spawned=spawned)
        except (TierfsError, OSError) as error:
            failure = describe(error)
            _logger.error("%s", failure.message, extra={"kind": failure.kind, "exit_code": failure.exit_code})  # noqa: TRY400 - no traceback
            return failure.exit_code


def _serve(engine: FlushEngine, directory: Path, url: str, linger_s: float, *, spawned: bool) -> int:
    from tierfs.flusher.server import Service  # noqa: PLC0415 - only what a command needs

    service = Service(engine, directory, version=__version__, linger_s=linger_s)
    about = {"store": url, "directory": str(directory), "pid": os.getpid()}
    _logger.info("starting the flusher of %s", url, extra=about)
    with _stopped_by_signals(service):
        ran = service.run()
    if ran:
        _logger.info("the flusher of %s has ended", url, extra=about)
        return 0
    if spawned:
        _logger.info("another flusher of %s is already running", url, extra=about)
        return 0  # the client that spawned this process uses the other flusher
    raise AlreadyExistsError(
        f"a flusher of {url} is already running: {suggested('flusher', 'stop', url)} ends it", path=url
    )


@contextlib.contextmanager
def _stopped_by_signals(service: Service) -> Iterator[None]:
    """Let the first SIGTERM or SIGINT end the flusher after its current steps, and a second one end the process."""
    signals = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        service.stop()

    previous = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _spawned(arguments: argparse.Namespace) -> tuple[FlushEngine, Path]:
    """Build the engine for the client that started this process, waits for an answer and then sends credentials.

    This loads only the modules needed to answer. Modules for the object tier take as long again to load, and are loaded
    when they are needed.
    """
    from tierfs.flusher.access import Way  # noqa: PLC0415 - only what a command needs
    from tierfs.flusher.engine import build_engine  # noqa: PLC0415
    from tierfs.flusher.priority import NICER, Priority  # noqa: PLC0415
    from tierfs.host.host import Host, state_directory  # noqa: PLC0415

    _raise_limits()
    uuid, codecs = arguments.uuid, "auto" if arguments.codecs is None else arguments.codecs
    state = state_directory(arguments.state_dir)
    host = Host(state)

    def connect(way: Way) -> StorePublisher:
        from tierfs.session.tiers import publisher_of  # noqa: PLC0415 - loads the store, which a client does not wait for

        return publisher_of(lambda: _open_as_told(way, uuid, codecs, state), host)

    # The client may die before it sends anything. A directory needs no credentials, so its drafts are flushed anyway.
    own = Way(arguments.url, {}) if arguments.url.startswith("file://") else None
    engine = build_engine(
        host,
        uuid,
        connect,
        ram_bytes=parse_size(arguments.ram or 0),
        nvme_bytes=parse_size(arguments.nvme or 0),
        bandwidth=parse_size(arguments.bandwidth or 0),
        own=own,
        priority=Priority(NICER),
        replication=_told_peers(arguments),
    )
    return engine, host.store_directory(uuid)


def _told_peers(arguments: argparse.Namespace) -> PeerReplication | None:
    """Return the settings of replication with which the client started this process."""
    if arguments.peers is None:
        return None
    from tierfs.peers.replication import replication_of  # noqa: PLC0415 - only with peers
    from tierfs.session.settings import PEER_OPTIONS, TierOptions  # noqa: PLC0415

    return replication_of(TierOptions(**{name: getattr(arguments, name, None) for name in PEER_OPTIONS}), 0)


def _raise_limits() -> None:
    """Raise the soft limits to the hard limits, but that of open files to `DESCRIPTORS_ENOUGH` at most.

    A flusher serves the whole host, not only the job that started it.
    """
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, *_MEMORY_LIMITS):
        soft, hard = resource.getrlimit(which)
        is_open_files = which == resource.RLIMIT_NOFILE
        wanted = DESCRIPTORS_ENOUGH if is_open_files and not 0 <= hard <= DESCRIPTORS_ENOUGH else hard
        if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
            with contextlib.suppress(OSError, ValueError):  # some sandboxes forbid it: keep the current limit
                resource.setrlimit(which, (wanted, hard))


def _open_as_told(way: Way, uuid: str, codecs: str, state: Path) -> Store:
    """Open the store at a client's URL, and check its id: changes must never reach another store than their own."""
    from tierfs.session import parse_url  # noqa: PLC0415 - only what a command needs
    from tierfs.session.open import open_bare  # noqa: PLC0415

    url = way.url
    location = parse_url(url)
    tiers = replace(location.tiers, codecs=codecs, state_dir=str(state))
    store, _ = open_bare(replace(location, options={**location.options, **way.options}, tiers=tiers))
    if store.descriptor.uuid != uuid:
        raise StoreNotFoundError(
            f"the store {uuid} is no longer at {url}: another store, {store.descriptor.uuid}, is there", path=url
        )
    return store


def _sidecar(arguments: argparse.Namespace) -> tuple[FlushEngine, Path]:
    """Build the engine for the writers on this host, with the credentials of this process."""
    from tierfs.flusher.engine import build_engine  # noqa: PLC0415 - only what a command needs
    from tierfs.flusher.upkeep import Upkeep  # noqa: PLC0415
    from tierfs.host.host import Host  # noqa: PLC0415
    from tierfs.host.local_state import claim  # noqa: PLC0415
    from tierfs.session.open import open_bare  # noqa: PLC0415
    from tierfs.session.tiers import publisher_of  # noqa: PLC0415

    location = _location(arguments)
    if location.protocol == "memory":
        raise InvalidInputError(f"{location.url} is in the memory of one process, and needs no flusher")
    store, settings = open_bare(location)
    if not (settings.ram_bytes or settings.nvme_bytes):
        raise InvalidInputError(f"the local tiers of {store.url} are switched off: give them room with --ram or --nvme")
    host, uuid = Host(settings.directory), store.descriptor.uuid
    directory = claim(host, uuid, store.objects.places(), store.url)
    publisher = publisher_of(lambda: open_bare(location)[0], host)
    ram, nvme = settings.ram_bytes, settings.nvme_bytes
    engine = build_engine(
        host,
        uuid,
        None,
        ram_bytes=ram,
        nvme_bytes=nvme,
        bandwidth=settings.bandwidth,
        publisher=publisher,
        replication=settings.replication,
    )
    gc_every_s = None if arguments.gc_every is None else parse_time(arguments.gc_every, "--gc-every")
    scrub_bandwidth = parse_size(arguments.scrub_bandwidth or 0)
    if gc_every_s is not None or scrub_bandwidth:
        upkeep = Upkeep(lambda: open_bare(location)[0], gc_every_s=gc_every_s, scrub_bandwidth=scrub_bandwidth)
        engine.keep_up(upkeep)
    if arguments.metrics is not None:
        _serve_metrics(arguments.metrics, location)
    words = "budgets: ram %s, nvme %s"
    _logger.info(
        words, format_bytes(ram), format_bytes(nvme), extra={"uuid": uuid, "ram_bytes": ram, "nvme_bytes": nvme}
    )
    return engine, directory


def _serve_metrics(port: int, location: Location) -> None:
    """Serve the metrics of the store. Each request reads the tiers; the object tier is asked once in `CONDITION_S`."""
    from tierfs.cli.commands._status_prometheus import serve_metrics  # noqa: PLC0415 - only where it is asked for
    from tierfs.session import open_store  # noqa: PLC0415
    from tierfs.store import status  # noqa: PLC0415
    from tierfs.store.status import condition  # noqa: PLC0415

    known: dict[str, Any] = {}
    asked_s = -math.inf

    def report() -> dict[str, Any]:
        nonlocal known, asked_s
        store = open_store(replace(location, resumes=False))[0]
        if store.clock.monotonic() - asked_s >= CONDITION_S:
            known, asked_s = condition(store), store.clock.monotonic()
        return status(store) | known

    serve_metrics(port, report)


# -- stop, discard -----------------------------------------------------------------------------------------------------


def _stop(arguments: argparse.Namespace) -> int:
    from tierfs.host.host import Host, state_directory  # noqa: PLC0415
    from tierfs.host.local_state import claim  # noqa: PLC0415
    from tierfs.host.rpc.client import stop_flusher  # noqa: PLC0415 - only what a command needs
    from tierfs.session.compose import local_store  # noqa: PLC0415
    from tierfs.session.open import open_bare  # noqa: PLC0415

    try:
        store, settings = open_bare(_location(arguments))
    except TierfsError as error:  # it is gone or out of reach, and may have left its flusher
        state, url = state_directory(arguments.state_dir), without_passwords(arguments.url)
        try:
            directory = state / "stores" / local_store(state, arguments.url).uuid
        except NotFoundError:
            raise error from None
    else:
        url, host, uuid = store.url, Host(settings.directory), store.descriptor.uuid
        try:
            directory = claim(host, uuid, store.objects.places(), url)
        except (StoreError, CapacityError):  # no usable place.json: pending changes stay, the flusher can be stopped
            directory = host.store_directory(uuid)
    with Progress("flusher stop"):
        stopped = stop_flusher(directory, __version__, timeout_s=STOP_TIMEOUT_S)
    ended = "has ended" if stopped else "was not running"
    return print_result(arguments, {"store": url, "stopped": stopped}, f"the flusher of {url} {ended}")


def _export(arguments: argparse.Namespace) -> int:
    from tierfs.cli.files.transfer import read_pieces  # noqa: PLC0415 - only what a command needs
    from tierfs.localfile import naming  # noqa: PLC0415
    from tierfs.session import open_store  # noqa: PLC0415
    from tierfs.store import open_conflict  # noqa: PLC0415

    store, path = open_store(_location(arguments))
    reader = open_conflict(store, path)
    with naming(arguments.file), open(arguments.file, "xb") as file:
        try:
            file.writelines(read_pieces(reader, 0, reader.length))
            file.flush()
        except BaseException:
            os.unlink(arguments.file)
            raise
    return print_result(
        arguments,
        {"bytes": reader.length},
        f"wrote {format_bytes(reader.length)} to {arguments.file}; {store.where(path)} is unchanged",
    )


def _discard(arguments: argparse.Namespace) -> int:
    from tierfs.session import open_store  # noqa: PLC0415 - only what a command needs
    from tierfs.store import discard_conflict  # noqa: PLC0415 - only what a command needs

    store, path = open_store(_location(arguments))
    count = discard_conflict(store, path)
    while arguments.recursive and (found := _discard_next(store, path)):
        count += found
    if not count:
        raise NotFoundError(
            f"no conflict is kept for {store.where(path)}: {suggested('status', store.url)} lists the conflicts",
            path=path,
        )
    return print_result(arguments, {"discarded": count}, f"discarded {count} changes of {store.where(path)}")


def _discard_next(store: Store, path: str) -> int:
    """Wait for the changes below ``path``, and discard the first conflict there. A change behind it may be the next."""
    from tierfs.format.keys import is_at_or_below  # noqa: PLC0415 - only what a command needs
    from tierfs.host.pending.levels import Level  # noqa: PLC0415
    from tierfs.store import discard_conflict, wait  # noqa: PLC0415

    try:
        wait(store, path, Level.OBJECT, store.timeout_s)
    except ConflictError as error:
        found = discard_conflict(store, error.path) if error.path and is_at_or_below(error.path, path) else 0
        if not found:  # a conflict elsewhere keeps it back: it was not named, so it stays
            raise
        return found
    return 0
