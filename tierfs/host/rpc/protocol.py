"""The protocol between a client and the flusher: messages over a Unix socket, and errors as messages.

A message is one packet of a ``SOCK_SEQPACKET`` socket: a JSON object of limited size. So no reader waits for the second
half of a message. Both ends ask the kernel for the other's user id, and accept only their own. `tierfs.flusher.server`
and `tierfs.host.rpc.client` define the content of the messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tierfs import errors
from tierfs.checked_json import parse_object
from tierfs.errors import FormatError, InvalidInputError, ReadOnlyError, StoreError, TierfsError
from tierfs.host.filesystems import explain

SOCKET_NAME = "flusher.sock"
LOCK_NAME = "flusher.lock"
MESSAGE_BYTES_MAX = 60_000
BACKLOG = 128
_ADDRESS_BYTES_MAX = 107  # sun_path, less its terminating zero
_ERROR_TEXT_MAX = 1500  # characters; each may take 12 bytes when escaped, and an error carries three texts
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

_KINDS: dict[str, type[TierfsError]] = {
    kind.kind: kind
    for kind in (getattr(errors, name) for name in errors.__all__)
    if kind not in {TierfsError, StoreError}
}


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode ``message`` as one packet.

    Raises:
        InvalidInputError: It holds values that JSON cannot represent, or is too long.
    """
    try:
        # Non-ASCII text is escaped, so that names that are no valid Unicode can be sent.
        data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"this cannot be sent to the flusher: {error}") from error
    if len(data) > MESSAGE_BYTES_MAX:
        raise InvalidInputError(f"a message of {len(data)} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    return data


def decode(data: bytes) -> dict[str, Any]:
    """Decode one packet.

    Raises:
        FormatError: It is not one JSON object.
    """
    return parse_object(data, "a message")


def send(sock: socket.socket, packet: bytes, *, flags: int = 0) -> None:
    """Send a packet from `encode`. Raises the socket's `OSError` if the other end is gone or slow."""
    sock.send(packet, flags | socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Wait for one message. Return None if the other end has closed the connection.

    Raises:
        FormatError: It is not a message, or is too long.
        OSError: The socket raised it.
    """
    # The kernel closes descriptors that are sent along, because there is no buffer for them.
    data, _, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX)
    if flags & socket.MSG_TRUNC:
        raise FormatError(f"not a message: over the limit of {MESSAGE_BYTES_MAX} bytes")
    return decode(data) if data else None


def describe_error(error: Exception) -> dict[str, Any]:
    """Return the answer for ``error``, always short enough for one message."""
    text = str(error)[:_ERROR_TEXT_MAX]
    if isinstance(error, TimeoutError):
        return {"kind": "timeout", "message": text, "transient": True}
    if not isinstance(error, TierfsError):
        return {"kind": StoreError.kind, "message": f"the flusher failed: {type(error).__name__}: {text}"}
    described: dict[str, Any] = {"kind": error.kind, "message": text}
    described |= {name: getattr(error, name, False) for name in ("transient", "refused")}
    where = {"path": error.path, "tier": error.tier}
    # An absent text is better than a truncated one.
    return described | {name: value for name, value in where.items() if value and len(value) <= _ERROR_TEXT_MAX}


def error_from(described: object) -> Exception:
    """Return the error that an answer describes: one of tierfs, or the builtin TimeoutError."""
    if not isinstance(described, dict):
        return FormatError("the flusher's answer has neither a result nor an error")
    message, kind = str(described.get("message", "")), described.get("kind")
    if kind == "timeout":
        return TimeoutError(message)
    path, tier = (value if isinstance(value, str) else None for value in map(described.get, ("path", "tier")))
    refused = described.get("refused") is True
    if kind == ReadOnlyError.kind:
        return ReadOnlyError(message, refused=refused, path=path, tier=tier)
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind](message, path=path, tier=tier)
    # This includes kinds that only a newer flusher knows.
    transient = described.get("transient") is True
    return StoreError(message, transient=transient, refused=refused, path=path, tier=tier)


def version_of(text: object) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparison: (0, 1) for "0.1.0rc1". () for anything else.

    Trailing zeros are dropped.
    """
    found = re.match(r"\d{1,9}(\.\d{1,9}){0,5}", text) if isinstance(text, str) else None
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def credentials_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the other end. The process id is 0 for one in another PID namespace."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def listen(directory: Path) -> socket.socket:
    """Listen in ``directory``, for this user only. The caller holds the flusher's lock.

    The socket replaces that of an earlier flusher.

    Raises:
        StoreError: The socket cannot be created.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _address(directory) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            sock.bind(address)
            os.chmod(address, 0o600)  # no client can connect before it listens
        sock.listen(BACKLOG)
        sock.settimeout(0)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise StoreError(
                f"{directory}: a flusher cannot listen there: {explain(error)}", path=str(directory)
            ) from error
        raise
    return sock


def identity_of(directory: Path) -> tuple[int, int] | None:
    """Return device and inode of the socket in ``directory``; None if there is none."""
    try:
        status = os.stat(directory / SOCKET_NAME)  # without a descriptor, which a busy process may not get
    except OSError:
        return None
    return status.st_dev, status.st_ino


def unlink(directory: Path) -> None:
    """Remove the socket's file, so that no more clients connect."""
    with _address(directory) as address:
        os.unlink(address)


def connect(directory: Path, timeout_s: float | None) -> socket.socket | None:
    """Connect to the flusher in ``directory``. Return None if none listens, or none accepts in time.

    Raises:
        ReadOnlyError: A process of another user listens there.
        StoreError: The address cannot be used.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        with _address(directory) as address:
            sock.connect(address)
        _, uid = credentials_of(sock)
        if uid != os.geteuid():
            raise ReadOnlyError(
                f"the process that listens at {directory / SOCKET_NAME} runs as uid {uid}, this one as uid "
                f"{os.geteuid()}: users cannot share a flusher. Set TIERFS_STATE_DIR to a directory of your own"
            )
    except (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError):
        sock.close()  # the socket is missing or stale, or its backlog is full
        return None
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, TierfsError):
            path = str(directory / SOCKET_NAME)
            kind = ReadOnlyError if isinstance(error, PermissionError) else StoreError
            raise kind(f"cannot connect to {path}: {error.strerror}", path=path) from error
        raise
    return sock


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    """Yield the socket's address, also if its path is longer than an address may be."""
    path = str(directory / SOCKET_NAME)
    if len(os.fsencode(path)) <= _ADDRESS_BYTES_MAX:
        yield path
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
