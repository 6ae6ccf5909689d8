"""The flusher's service: its socket, the lock that makes it the only flusher of a store, and its retirement.

The engine (`tierfs.flusher.engine`) executes the requests. A connection carries one request at a time. A client with
several concurrent requests opens several connections, so a long wait delays no other request.

The service may retire whenever it is idle, because it has no state to lose. Staged data lies in slabs and in the index.
All requests are idempotent, and a client whose connection breaks before the answer asks the next flusher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tierfs._fork import renew_in_children
from tierfs.clock import Clock, SystemClock
from tierfs.errors import FormatError, InvalidInputError, TierfsError
from tierfs.flusher.engine import Client, FlushEngine
from tierfs.host.host import ExclusiveLock
from tierfs.host.rpc import protocol as wire
from tierfs.host.rpc.protocol import LOCK_NAME

CONNECTIONS_MAX = 256  # each has a thread
FIRST_CLIENT_S = 5.0  # least time for the client that started the flusher to connect, even with a shorter linger
# How long to wait for the lock. A process that looks for a flusher holds it for an instant, and a retiring flusher
# until it has closed everything.
ACQUIRE_S = 1.0
TICK_S = 0.1
TICK_BUSY_S = 1.0  # while there are clients or work, so that the service cannot retire anyway
_PAUSE_S = 0.01
_logger = logging.getLogger("tierfs.flush")


class ClientConnection(Client):
    """A client's connection, whose thread calls the engine. The service's thread detects hang-ups and closes the socket."""

    def __init__(self, sock: socket.socket, number: int, pid: int) -> None:
        super().__init__(number, pid)
        self.sock = sock
        self.is_watched = True
        self.is_busy = False
        self.is_over = False
        self.used_at = time.monotonic()

    def hang_up(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(how)


class Service:
    """The service of one flusher. Call `run` once.

    Args:
        engine: Executes the requests.
        directory: The store's directory on this host, absolute. It holds the lock and the socket.
        version: The version of this tierfs. A client with a newer version may make the service retire.
        linger_s: Seconds to stay without clients and work before retiring.
        clock: Measures lingering.
    """

    def __init__(
        self, engine: FlushEngine, directory: Path, *, version: str, linger_s: float, clock: Clock | None = None
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._version = version
        self._linger_s = linger_s
        self._clock = clock or SystemClock()
        self._is_stopping = False
        self._wakeup = -1
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None
        self._connections: dict[int, ClientConnection] = {}  # by file descriptor
        self._threads: set[threading.Thread] = set()
        self._served = 0
        renew_in_children(self)

    def stop(self) -> None:
        """Make `run` return soon. Any thread or a signal handler may call this."""
        self._is_stopping = True
        self._wake()

    def run(self) -> bool:
        """Serve until the service retires or is stopped.

        Returns:
            False if another flusher held the lock, so that this one did nothing.
        """
        lock = ExclusiveLock(self._directory / LOCK_NAME)
        patience_ends = time.monotonic() + ACQUIRE_S
        while not lock.acquire(blocking=False):
            if self._is_stopping or time.monotonic() >= patience_ends:
                return False
            time.sleep(_PAUSE_S)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._engine.start()
            try:
                self._listener = wire.listen(self._directory)
                self._identity = wire.identity_of(self._directory)
                self._serve(self._listener)
            finally:
                self._retire()
        finally:
            wakeup, self._wakeup = self._wakeup, -1
            os.close(wakeup)
            lock.release()
        return True

    def _serve(self, listener: socket.socket) -> None:
        """Accept clients and detect hang-ups, until there has been no client and no work for long enough.

        The step of the loop that decides to retire has itself found no client and no work.
        """
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(listener, select.POLLIN)
        idle_since: float | None = None
        pause_s = 0.0
        while not self._is_stopping:
            events = poll.poll(pause_s * 1000)
            for descriptor, _ in events:
                if descriptor == listener.fileno():
                    self._accept(listener, poll)
                elif descriptor == self._wakeup:
                    os.eventfd_read(descriptor)
                else:
                    poll.unregister(descriptor)
                    self._tell_of_hang_up(self._connections[descriptor])
            self._close_those_over(poll)
            if events:
                pause_s = 0.0
                continue
            pause_s = TICK_BUSY_S if self._connections else TICK_S
            if wire.identity_of(self._directory) != self._identity:
                # The socket was removed or replaced. Clients cannot find this flusher, but they will find the next.
                _logger.warning("%s was removed or replaced: this flusher exits", self._directory / wire.SOCKET_NAME)
                return
            if self._connections or not self._engine.is_idle():
                idle_since = None
                pause_s = TICK_BUSY_S
                continue
            now = self._clock.monotonic()
            idle_since = now if idle_since is None else idle_since
            linger_s = self._linger_s if self._served else max(self._linger_s, FIRST_CLIENT_S)
            if now - idle_since >= linger_s:
                return

    def _accept(self, listener: socket.socket, poll: select.poll) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            self._drop_an_idle_one()
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        pid, uid = wire.credentials_of(sock)
        if uid != os.geteuid():
            _logger.warning("refused the connection of process %d: it runs as uid %d", pid, uid)
            sock.close()
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            sock.close()  # the client retries in a moment
            return
        sock.settimeout(None)
        self._served += 1
        connection = ClientConnection(sock, self._served, pid)
        name = f"tierfs-flusher-{connection.number}"
        thread = threading.Thread(target=self._converse, args=(connection,), name=name, daemon=True)
        try:
            thread.start()
        except BaseException:
            sock.close()
            raise
        self._threads.add(thread)
        self._connections[sock.fileno()] = connection
        poll.register(sock, select.POLLRDHUP)

    def _drop_an_idle_one(self) -> None:
        """Close the least recently used idle connection. Its client opens another when it needs one."""
        idle = [connection for connection in self._connections.values() if not connection.is_busy]
        if idle:
            min(idle, key=lambda connection: connection.used_at).hang_up(socket.SHUT_RD)

    def _tell_of_hang_up(self, connection: ClientConnection) -> None:
        connection.is_watched = False
        connection.gone.set()
        if connection.is_busy and connection.version:
            self._engine.gone(connection)

    def _close_those_over(self, poll: select.poll) -> None:
        # Sockets are closed only here, because a polled descriptor must not be reused for another file.
        for descriptor, connection in list(self._connections.items()):
            if connection.is_over:
                if connection.is_watched:
                    poll.unregister(descriptor)
                del self._connections[descriptor]
                connection.sock.close()
        self._threads = {thread for thread in self._threads if thread.is_alive()}

    def _retire(self) -> None:
        self._is_stopping = True
        if self._listener is not None:
            if wire.identity_of(self._directory) == self._identity:
                wire.unlink(self._directory)
            self._listener.close()
        for connection in self._connections.values():
            connection.hang_up(socket.SHUT_RD)  # an answer in flight is still sent
        try:
            self._engine.stop()
        finally:
            for connection in self._connections.values():
                self._tell_of_hang_up(connection)
            for thread in self._threads:
                thread.join()  # without a limit: no request may run when the tiers are closed and the lock is released
            self._engine.close()
            for connection in self._connections.values():
                connection.sock.close()
            self._connections.clear()

    # -- on a connection's thread ------------------------------------------------------------------------------------

    def _converse(self, connection: ClientConnection) -> None:
        try:
            while (message := wire.receive(connection.sock)) is not None:
                connection.is_busy = True
                try:
                    packet = self._answer(connection, message)
                finally:
                    connection.used_at = time.monotonic()
                    connection.is_busy = False
                # If a client does not read its answers, its connection fills up, and this send fails and closes it.
                wire.send(connection.sock, packet, flags=socket.MSG_DONTWAIT)
        except FormatError as error:
            _logger.warning("the connection of process %d is closed: %s", connection.pid, error)
        except OSError as error:
            _logger.debug("the connection of process %d broke: %s", connection.pid, error)
        finally:
            connection.hang_up(socket.SHUT_RDWR)
            try:
                if connection.version:
                    connection.gone.set()
                    self._engine.gone(connection)
            finally:
                connection.is_over = True
                self._wake()

    def _answer(self, connection: ClientConnection, message: dict[str, Any]) -> bytes:
        """Execute a request, and return the packet with the answer.

        Raises:
            FormatError: The message is not a request, or the first message is not a hello.
        """
        number, do, arguments = message.get("id"), message.get("do"), message.get("arguments", {})
        if type(number) is not int or not isinstance(do, str) or not isinstance(arguments, dict):
            raise FormatError("not a request")
        if not connection.version:
            version = arguments.get("version")
            if do != "hello" or not isinstance(version, str) or not version:
                raise FormatError("a connection begins with hello and the client's version")
            connection.version = version
        # Tells the client to ask the next flusher.
        ended = wire.encode({"id": number, "ended": True})
        if self._is_stopping:
            return ended
        outcome: dict[str, Any] = {}
        try:
            if do in ("retire", "stop"):
                self._retire_for(connection, asked_to_stop=do == "stop")
            else:
                outcome = self._engine.handle(do, arguments, connection)
            more = {"version": self._version} if do == "hello" else {}
            return wire.encode({"id": number, "ok": outcome | more})
        except Exception as error:
            if self._is_stopping:
                return ended  # the stop probably caused the error
            if not isinstance(error, (TierfsError, TimeoutError)):
                _logger.exception("%s failed", do)
            return wire.encode({"id": number, "error": wire.describe_error(error)})

    def _retire_for(self, client: ClientConnection, *, asked_to_stop: bool = False) -> None:
        if asked_to_stop:
            _logger.info("stopping: process %d asked for it", client.pid)
        elif wire.version_of(client.version) <= wire.version_of(self._version):
            raise InvalidInputError(f"tierfs {client.version} may not replace a flusher of tierfs {self._version}")
        else:
            _logger.info("exiting: a client runs the newer tierfs %s", client.version)
        self.stop()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # another thread may have closed the descriptor
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _renew(self) -> None:
        """Close all sockets in a forked child. Clients must not reach the child, and must notice the parent's end."""
        wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            os.close(wakeup)
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections.values():
            connection.sock.close()
