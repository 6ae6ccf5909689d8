"""The owner's side: sends drafts and their chunks to one other host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tierfs.buffers import buffers
from tierfs.clock import Pace
from tierfs.errors import CapacityError, CorruptionError, FormatError, StoreError, TierfsError
from tierfs.format.manifest import Manifest, Row
from tierfs.host.pending.record import Draft
from tierfs.peers.room import elsewhere
from tierfs.peers.wire import NAMES_MAX, VERSION, BodyReader, Connection, dial

if TYPE_CHECKING:
    import ssl

    from tierfs.format.lease import PeerRecord
    from tierfs.host.chunk_sources import ChunkSources

STREAMS = 4
DIAL_S = 5.0
GONE_S = 2.0
HOLD_S = 10.0
ANSWER_S = 20.0  # a host that is silent for so long is replaced


class PeerClient:
    """Connections to one other host. `send` is for one thread, which sends drafts in closing order.

    Args:
        record: The other host.
        context: The TLS context, which trusts that host alone.
        store: The store's uuid.
        pace: Limits the bytes that are sent.

    Raises:
        OSError: The host does not answer, or is another one.
        TierfsError: It refuses.
    """

    def __init__(self, record: PeerRecord, context: ssl.SSLContext, store: str, pace: Pace) -> None:
        self.record = record
        self._context = context
        self._store = store
        self._pace = pace
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._workers = ThreadPoolExecutor(STREAMS, thread_name_prefix="tierfs-peer")
        self.sent_bytes = 0
        self.turn = threading.Lock()
        """Held from the look whether a draft is pending until the other host holds it, or while it is told to drop it."""
        self._open: set[Connection] = set()

    def __repr__(self) -> str:
        return f"PeerClient({self.record.host!r}, {self.record.address}:{self.record.port})"

    def close(self) -> None:
        """Close the connections. Requests under way fail."""
        self._workers.shutdown()
        while self._idle:
            self._idle.pop().close()

    def hang_up(self) -> None:
        """Let the requests under way fail, on whatever thread."""
        for connection in list(self._open):
            connection.close()

    def ask(
        self, do: str, body: memoryview | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request and return its answer. Raises as `Connection.ask`, and `OSError` if there is no connection."""
        with self._connection(DIAL_S) as connection:
            connection.set_timeout(timeout_s)
            return connection.ask({"do": do, **arguments}, body)

    def fetch(self, do: str, take: BodyReader, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a request, and let ``take`` read the body of its answer.

        Args:
            do: The request.
            take: See there. After an error of it the connection is closed.
            timeout_s: Limit for connecting, and for the request as a whole.
            **arguments: Of the request.

        Raises:
            Exception: As `ask`, or as ``take``.
        """
        with self._connection(min(timeout_s, GONE_S)) as connection:
            connection.set_timeout(timeout_s, whole=True)
            return connection.ask({"do": do, **arguments}, take=take)

    def held(self) -> list[bytes]:
        """Return the write ids of the drafts of this host that the other one holds."""
        found: list[bytes] = []
        while True:
            page = self.ask("list", after=len(found))["write_ids"]
            found += [bytes.fromhex(each) for each in page]
            if len(page) < NAMES_MAX:
                return found

    def forget(self, write_ids: Sequence[bytes]) -> None:
        """Say that the object tier has these drafts."""
        for at in range(0, len(write_ids), NAMES_MAX):
            self.ask("gone", timeout_s=GONE_S, write_ids=[each.hex() for each in write_ids[at : at + NAMES_MAX]])

    def adopt(self, write_ids: Sequence[bytes]) -> None:
        """Ask the other host to bring drafts to the object tier that this host does not have any more."""
        for at in range(0, len(write_ids), NAMES_MAX):
            self.ask("adopt", write_ids=[each.hex() for each in write_ids[at : at + NAMES_MAX]])

    def send(self, draft: Draft, sources: ChunkSources, is_stopped: Callable[[], bool]) -> int:
        """Send the chunks of a draft that the other host lacks. `hold` has to follow.

        Args:
            draft: The draft.
            sources: The copies of its chunks on this host.
            is_stopped: Returns whether to give up.

        Returns:
            The tier of the other host that has them, for `hold`.

        Raises:
            CapacityError: The other host has no room.
            CorruptionError: No copy of a chunk on this host is sound.
            OSError: The connection failed.
            TierfsError: The other host failed.
        """
        rows = draft.record.rows if isinstance(draft.record, Manifest) else ()
        wanted = dict(zip(draft.names, rows, strict=True))
        away = set(elsewhere(draft))
        names = [name for name in wanted if name not in away]
        size = sum(wanted[name].raw_length for name in names)
        tier = self.ask("room", bytes=size)["tier"]
        if tier is None:
            raise CapacityError(f"{self.record.host} has no room for a file of {size} bytes", tier="peer")
        tasks = []
        for at in range(0, len(names), NAMES_MAX):
            page = names[at : at + NAMES_MAX]
            indexes = self.ask("lack", tier=tier, names=[name.hex() for name in page])["lacks"]
            tasks += [
                self._workers.submit(self._send_chunk, tier, wanted[page[index]], page[index], sources, is_stopped)
                for index in indexes
            ]
        errors = [error for error in (task.exception() for task in tasks) if error is not None]
        if errors:
            raise errors[0]
        return int(tier)

    def hold(self, draft: Draft, tier: int) -> bool:
        """Send a draft whose chunks the other host has. Return false if it has dropped some: then `send` again."""
        return bool(self.ask("draft", memoryview(draft.encode()), timeout_s=HOLD_S, tier=tier)["held"])

    def _send_chunk(
        self, tier: int, row: Row, name: bytes, sources: ChunkSources, is_stopped: Callable[[], bool]
    ) -> None:
        if is_stopped():
            raise StoreError("the flusher is ending", transient=True)
        with buffers().lend(row.raw_length) as out:
            if sources.read_whole(row, out) is None:
                raise CorruptionError(f"no sound copy of chunk {name.hex()} is on this host", tier="ram")
            self._pace.take(len(out))
            self.ask("chunk", out, tier=tier, name=name.hex())
            self.sent_bytes += len(out)

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[Connection]:
        """Lend a connection. It is closed if an error may have left half of a frame on it."""
        connection = None
        while connection is None:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._dial(timeout_s)
            elif connection.is_closed():
                connection.close()
                connection = None
        self._open.add(connection)
        try:
            yield connection
        except BaseException as error:
            if isinstance(error, TierfsError) and not isinstance(error, FormatError):
                self._keep(connection)  # the other host answered
            else:
                connection.close()
            raise
        finally:
            self._open.discard(connection)
        self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            self._idle.append(connection)

    def _dial(self, timeout_s: float) -> Connection:
        connection = dial(self.record.address, self.record.port, self._context, timeout_s)
        try:
            if connection.certificate != self.record.certificate:
                raise ConnectionError(f"{self.record.address}:{self.record.port} is another host")
            connection.set_timeout(timeout_s)
            connection.ask({"do": "hello", "store": self._store, "version": VERSION})
        except BaseException:
            connection.close()
            raise
        return connection
