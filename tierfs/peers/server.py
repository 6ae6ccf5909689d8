"""The holder's side: accepts connections from other hosts, and keeps what they send in the `PeerRoom`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import operator
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, StoreError, TierfsError
from tierfs.format.envelope import block_count
from tierfs.format.keys import ChunkName
from tierfs.format.lease import peer_id
from tierfs.format.manifest import Row
from tierfs.host.chunk_sources import ChunkRequest
from tierfs.peers.members import Members
from tierfs.peers.room import PeerRoom
from tierfs.peers.settings import Identity, PeerSettings
from tierfs.peers.wire import NAMES_MAX, VERSION, Connection, accept, listen
from tierfs.threads import start_daemon

if TYPE_CHECKING:
    from tierfs.host.chunk_sources import BlockTable, ChunkSources

CONNECTIONS_MAX = 256
CHUNKS_MAX = 3
"""Chunks that may arrive at the same time: each takes 16 MiB of memory until it is in its file."""
HANDSHAKE_S = 5.0
DRAFT_BYTES_MAX = 64 << 20
PAGE_BYTES = 8 << 20
TICK_S = 0.5
_logger = logging.getLogger("tierfs.peers")


class PeerServer:
    """Serves other hosts. Each connection has a thread.

    Args:
        identity: This host.
        settings: Where to listen.
        store: The store's uuid.
        room: Keeps what other hosts send.
        members: The hosts that may connect.
        sources: Returns this host's copies of the chunks with this kind of digest.
        bring: Called with the local name and the row of a chunk of the object tier that is not on this host. Makes it
            one of its copies.
        adopt: Called with write ids that their owner has lost. Does not block.
        greet: Called when a host without a known certificate connects, so that the list of hosts is read again.

    Raises:
        StoreError: The address cannot be used.
    """

    def __init__(
        self,
        identity: Identity,
        settings: PeerSettings,
        store: str,
        room: PeerRoom,
        members: Members,
        *,
        sources: Callable[[DigestKind], ChunkSources],
        bring: Callable[[bytes, Row], None],
        adopt: Callable[[list[bytes]], None],
        greet: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._store = store
        self._room = room
        self._members = members
        self._sources = sources
        self._bring = bring
        self._adopt = adopt
        self._greet = greet
        self._trusted: list[bytes] | None = None
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._free = threading.Semaphore(CONNECTIONS_MAX)  # connections that may still be accepted
        self._buffers = threading.Semaphore(CHUNKS_MAX)
        self._is_stopping = False
        try:
            self._listener = _listen(settings)
        except OSError as error:
            where = f"{settings.address}:{settings.port}"
            raise StoreError(
                f"other hosts cannot be served at {where}: {error.strerror or error}: set peer_listen= "
                "(TIERFS_PEER_LISTEN) to an address of this host",
                path=where,
            ) from error
        self._listener.settimeout(TICK_S)
        self._thread = threading.Thread(target=self._accept_all, name="tierfs-peers", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End all connections, and accept no more."""
        self._is_stopping = True
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.close()

    def _accept_all(self) -> None:
        while not self._is_stopping:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                _logger.warning("a connection of a peer cannot be accepted: %s", error)
                time.sleep(TICK_S)  # this process may have too many open files
                continue
            if not self._free.acquire(blocking=False):
                self._close_an_idle_one()
                if not self._free.acquire(timeout=TICK_S):
                    sock.close()
                    continue
            if start_daemon(self._serve, sock, name="peer") is None:
                _logger.warning("a connection of a peer cannot be served: this process cannot start a thread")
                self._free.release()
                sock.close()

    def _close_an_idle_one(self) -> None:
        """Close the connection that was not used for the longest time. Its client opens another when it needs one."""
        with self._lock:
            idle = [(each.idle_since, each) for each in self._connections if each.idle_since is not None]
            if idle:
                min(idle, key=operator.itemgetter(0))[1].close()

    def _trust(self) -> ssl.SSLContext:
        with self._lock:
            trusted = [self._identity.certificate, *self._members.certificates()]  # processes of this host ask, too
            if self._context is None or trusted != self._trusted:
                self._context, self._trusted = self._identity.context(trusted, server=True), trusted
            return self._context

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._greet_and_answer(sock)
        finally:
            self._free.release()

    def _greet_and_answer(self, sock: socket.socket) -> None:
        try:
            connection = accept(sock, self._trust(), HANDSHAKE_S)
        except OSError as error:
            _logger.info("a host without a known certificate was refused: %s", error)
            self._greet()
            return
        with self._lock:
            self._connections.add(connection)
        try:
            self._answer_all(connection, peer_id(connection.certificate))
        except (OSError, TierfsError) as error:
            _logger.info("the connection of a peer ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer_all(self, connection: Connection, host: str) -> None:
        is_greeted = False
        while not self._is_stopping and (received := connection.receive()) is not None:
            connection.idle_since = None
            message, length = received
            if not is_greeted and message.get("do") != "hello":
                raise FormatError("a peer did not greet")
            left = [length]
            outcome: dict[str, Any] | Exception
            pieces: Iterable[memoryview] = ()
            size = 0
            try:
                if message["do"] in {"drafts", "read"}:
                    outcome, pieces, size = (self._drafts if message["do"] == "drafts" else self._read)(message)
                else:
                    outcome = self._do(connection, host, message, left)
                is_greeted = True
            except TierfsError as error:
                outcome = error
            except (KeyError, TypeError, ValueError) as error:
                outcome = InvalidInputError(f"a peer asked {message.get('do')!r} with bad arguments: {error!r}")
            _skip(connection, left[0])
            connection.answer(outcome, pieces, size)
            connection.idle_since = time.monotonic()

    def _drafts(self, message: dict[str, Any]) -> tuple[dict[str, Any], Iterable[memoryview], int]:
        """Answer with the drafts that are held here for any host, unless the asker has seen them."""
        changes, page, size = self._room.changes, list[memoryview](), 0
        if message["seen"] == changes:
            return {"changes": changes, "lengths": [], "next": None}, (), 0
        held = [each for each in self._room.held() if not each.is_conflict]
        at = int(message["after"])
        while at < len(held) and len(page) < NAMES_MAX and (not page or size < PAGE_BYTES):
            if held[at].is_whole():
                page.append(memoryview(held[at].draft.encode()))
                size += len(page[-1])
            at += 1
        more = at if at < len(held) else None
        return {"changes": changes, "lengths": [len(each) for each in page], "next": more}, page, size

    def _read(self, message: dict[str, Any]) -> tuple[dict[str, Any], Iterable[memoryview], int]:
        """Answer with verified blocks of a chunk, and the digests of all of its blocks."""
        name, length, wanted = bytes.fromhex(message["name"]), int(message["length"]), message["blocks"]
        kind = DigestKind(name[0])
        count = block_count(length) if 0 < length <= CHUNK_BYTES else 0
        if len(name) != 1 + kind.size or not wanted or not {*wanted} <= {*range(count)} or len(wanted) > count:
            raise InvalidInputError("a chunk has a wrong name or length, or lacks a block that a peer asked for")
        found = _verified(self._sources(kind), ChunkRequest(name, length), wanted)
        first = next(found, None)
        if first is None and "stored" in message:
            generation, recipe = int(message["generation"]), bytes.fromhex(message["recipe"])
            self._bring(name, Row(ChunkName(name[1:], generation, recipe), length, int(message["stored"])))
            found = _verified(self._sources(kind), ChunkRequest(name, length), wanted)
            first = next(found, None)
        if first is None:
            return {"digests": None}, (), 0
        table, block = first
        size = sum(min(BLOCK_BYTES, length - index * BLOCK_BYTES) for index in wanted)
        pieces = itertools.chain([block], (piece for _, piece in found))
        return {"digests": [each.hex() for each in table.digests]}, pieces, size

    def _do(self, connection: Connection, host: str, message: dict[str, Any], left: list[int]) -> dict[str, Any]:
        """Run one request. ``left`` has the number of bytes of the body that are not read yet."""
        room = self._room
        match message["do"]:
            case "hello":
                if message["store"] != self._store or message["version"] != VERSION:
                    raise InvalidInputError("the peer has another store, or another version of the protocol")
                return {}
            case "room":
                return {"tier": room.choose(int(message["bytes"]))}
            case "lack":
                names = [bytes.fromhex(name) for name in message["names"][:NAMES_MAX]]
                return {"lacks": room.lacking(int(message["tier"]), names)}
            case "chunk":
                name, length = bytes.fromhex(message["name"]), left[0]
                if not 0 < length <= CHUNK_BYTES or len(name) != 1 + DigestKind(name[0]).size:
                    raise InvalidInputError("a chunk has a wrong name or length")
                left[0] = 0
                with self._buffers:
                    room.take_chunk(int(message["tier"]), name, length, connection)
                return {}
            case "draft":
                if left[0] > DRAFT_BYTES_MAX:
                    raise InvalidInputError(f"a draft of {left[0]} bytes")
                data = bytearray(left[0])
                left[0] = 0
                connection.read_into(memoryview(data))
                return {"held": not room.take_draft(int(message["tier"]), host, bytes(data))}
            case "gone":
                mine = set(room.write_ids(host))
                room.forget([each for each in map(bytes.fromhex, message["write_ids"]) if each in mine])
                return {}
            case "list":
                found = [write_id.hex() for write_id in room.write_ids(host)]
                return {"write_ids": found[int(message["after"]) :][:NAMES_MAX]}
            case "adopt":
                asked = [bytes.fromhex(each) for each in message["write_ids"]]
                room.forget([each for each in asked if room.owner_of(each) is None])  # published here before
                self._adopt([each for each in asked if room.owner_of(each) is not None])
                return {}
            case other:
                raise InvalidInputError(f"unknown request {other!r} of a peer")


def _listen(settings: PeerSettings) -> socket.socket:
    """Listen at the address. Another store of this host may have the port: then take a free one, which peers find."""
    try:
        return listen(settings.address, settings.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        sock = listen(settings.address, 0)
        text = "port %d is in use, so peers are served at port %d: a firewall has to let that through"
        _logger.warning(text, settings.port, sock.getsockname()[1])
        return sock


def _skip(connection: Connection, count: int) -> None:
    """Read the rest of a body that nobody wants."""
    with contextlib.ExitStack() as lent:
        out = lent.enter_context(buffers().lend(min(count, CHUNK_BYTES))) if count else memoryview(b"")
        while count:
            connection.read_into(out[: min(count, len(out))])
            count -= min(count, len(out))


def _verified(
    sources: ChunkSources, chunk: ChunkRequest, wanted: Sequence[int]
) -> Iterator[tuple[BlockTable, memoryview]]:
    """Yield verified blocks of a chunk in this order, all from the same copy, which is quarantined if it is damaged.

    Nothing is yielded if no copy has a sound first block. Each block is valid until the next one.

    Raises:
        CorruptionError: A block after the first one is damaged.
    """
    with buffers().lend(min(BLOCK_BYTES, chunk.length)) as memory:
        for copy in itertools.chain.from_iterable(tier.copies(chunk) for tier in sources.tiers):
            is_begun = False
            try:
                for index in wanted:
                    start = index * BLOCK_BYTES
                    block = memory[: min(BLOCK_BYTES, chunk.length - start)]
                    copy.read(start, block)
                    table = copy.table()
                    if digest.hash_bytes(table.kind, block) != table.digests[index]:
                        raise CorruptionError(f"block {index} of chunk {chunk.name.hex()} is damaged", tier="peer")
                    is_begun = True
                    yield table, block
                return
            except (CorruptionError, FormatError, NotFoundError) as error:
                if not isinstance(error, NotFoundError):
                    copy.quarantine(error)
                if is_begun:
                    raise
