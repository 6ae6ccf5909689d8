"""An object tier that fails on demand: faults as ordinary inputs of a test.

Which fault strikes when follows from the plan and the order of calls, and where a bit flips or a write tears from the
seed, so a run repeats exactly.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from tierfs.clock import Clock, ManualClock
from tierfs.digest import Buffer
from tierfs.errors import CapacityError, CorruptionError, InvalidInputError, ReadOnlyError, StoreError, TierfsError
from tierfs.objects.protocol import (
    OVERWRITE,
    Checksum,
    Listed,
    ObjectInfo,
    ObjectTier,
    PutMode,
    Range,
    Take,
    Use,
    Version,
)
from tierfs.objects.wrappers.wrapper import METHODS, WrappedObjects
from tierfs.testing._armed import ArmedFaults

__all__ = ["Fault", "FaultyObjects", "PlannedFault"]

Answer = TypeVar("Answer")


class Fault(enum.Enum):
    """The kinds of faults."""

    REFUSED = "refused"
    """Nothing happens, then a transient `StoreError`."""
    DENIED = "denied"
    """Nothing happens, then `ReadOnlyError`."""
    FULL = "full"
    """Nothing is stored, then `CapacityError`."""
    LOST_RESPONSE = "lost-response"
    """It happens, then a transient `StoreError`. A listing breaks off part of the way through."""
    LATE = "late"
    """A transient `StoreError` now; it happens when `FaultyObjects.deliver_late` is called."""
    TORN = "torn"
    """The first part of the object is stored, then a `StoreError` that is not transient."""
    BIT_FLIP = "bit-flip"
    """One bit of what is read is another, and nobody says so."""
    SHORT_READ = "short-read"
    """`CorruptionError`, as if the object were too short."""
    SLOW = "slow"
    """It happens after a long wait."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that it can strike."""
        match self:
            case Fault.LATE:
                return ("put", "delete", "delete_version")
            case Fault.TORN | Fault.FULL:
                return ("put",)
            case Fault.BIT_FLIP | Fault.SHORT_READ:
                return ("get", "read")
            case _:
                return METHODS


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault, and the call that it is to strike.

    Attributes:
        fault: The kind.
        method: Which method it waits for; ``None`` for any that it can strike.
        after: How many calls that it might strike it lets pass first.
        key_part: Only calls with this in their key, prefix, or one of their keys.
        seconds: How long a slow one takes.
    """

    fault: Fault
    method: str | None = None
    after: int = 0
    key_part: str = ""
    seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse a fault that could never strike."""
        if self.method is not None and self.method not in self.fault.methods:
            raise InvalidInputError(f"{self.fault.value} cannot strike {self.method}: only {self.fault.methods}")

    def matches(self, method: str, keys: Sequence[str]) -> bool:
        """Whether it might strike this call."""
        wanted = self.fault.methods if self.method is None else (self.method,)
        return method in wanted and any(self.key_part in key for key in keys)


class FaultyObjects(WrappedObjects):
    """An object tier in which planned faults strike; otherwise it hands every call on. Thread-safe.

    A call is struck by the first planned fault that is due; each strikes once. A listing is struck when its first entry
    is asked for.

    Args:
        inner: The tier to hand on to.
        plan: Faults to begin with.
        seed: Decides where bits flip and writes tear; shown by ``repr``.
        clock: For the waits of slow calls.

    Attributes:
        fired: The faults that struck: fault, method and key.
    """

    def __init__(
        self, inner: ObjectTier, plan: Iterable[PlannedFault] = (), *, seed: int = 0, clock: Clock | None = None
    ) -> None:
        super().__init__(inner)
        self.seed = seed
        self.fired: list[tuple[Fault, str, str]] = []
        self._clock: Clock = clock or ManualClock()
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._armed = ArmedFaults(plan)
        self._late: list[Callable[[], ObjectInfo | None]] = []

    def __repr__(self) -> str:
        return f"FaultyObjects({self.inner!r}, seed={self.seed}, pending={self.pending}, late={self.late})"

    def inject(
        self, fault: Fault, *, method: str | None = None, after: int = 0, key_part: str = "", seconds: float = 60.0
    ) -> None:
        """Plan one more fault. The arguments are those of `PlannedFault`."""
        self._armed.add(PlannedFault(fault, method, after, key_part, seconds))

    def clear(self) -> None:
        """Forget the faults that have not struck yet. Late operations stay under way."""
        self._armed.clear()

    @property
    def pending(self) -> int:
        """How many faults have not struck yet."""
        return len(self._armed)

    @property
    def late(self) -> int:
        """How many operations are still under way."""
        return len(self._late)

    def deliver_late(self) -> list[ObjectInfo | TierfsError | None]:
        """Let every operation that is under way take effect, in the order in which they were sent.

        Returns:
            What each came to: what it returned or the error it met. Nobody is waiting for it any more.
        """
        with self._lock:
            late, self._late = self._late, []
        outcomes: list[ObjectInfo | TierfsError | None] = []
        for operation in late:
            try:
                outcomes.append(operation())
            except TierfsError as error:  # noqa: PERF203 - one's failure must not keep the others back
                outcomes.append(error)
        return outcomes

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        """See `ObjectTier.put`."""
        fault = self._strike("put", [key])
        if fault is Fault.LATE:
            kept = [bytes(piece) for piece in data]  # the caller's buffers are only lent
            raise self._keep(key, lambda: self.inner.put(key, kept, mode=mode, checksum=checksum))
        if fault is Fault.TORN:
            content = b"".join(data)
            part = content[: self._below(len(content))]
            self.inner.put(key, [part], mode=mode)
            raise StoreError(f"{key}: injected: torn after {len(part)} of {len(content)} bytes", path=key)
        return self._send(fault, key, lambda: self.inner.put(key, data, mode=mode, checksum=checksum))

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        """See `ObjectTier.get`."""
        fault = self._strike("get", [key])
        info = self._send(fault, key, lambda: self.inner.get(key, ranges, version=version))
        if fault is Fault.BIT_FLIP:
            self._flip([out for _, out in ranges])
        return info

    def stream(self, key: str, length: int, use: Use) -> None:
        """See `ObjectTier.stream`. It is struck by faults of ``get``."""
        fault = self._strike("get", [key])
        flipped = self._below(8 * length) if fault is Fault.BIT_FLIP else -1

        def use_flipped(info: ObjectInfo, take: Take) -> None:
            left = flipped

            def take_flipped(count: int) -> memoryview:
                nonlocal left
                piece = take(count)
                if 0 <= left < 8 * count:
                    piece = memoryview(bytearray(piece))
                    piece[left // 8] ^= 1 << left % 8
                left -= 8 * count
                return piece

            use(info, take_flipped)

        self._send(fault, key, lambda: self.inner.stream(key, length, use_flipped))

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        """See `ObjectTier.read`."""
        fault = self._strike("read", [key])
        content, info = self._send(fault, key, lambda: self.inner.read(key, limit))
        if fault is Fault.BIT_FLIP:
            flipped = bytearray(content)
            self._flip([memoryview(flipped)])
            content = bytes(flipped)
        return content, info

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectTier.head`."""
        return self._send(self._strike("head", [key]), key, lambda: self.inner.head(key))

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        """See `ObjectTier.list`."""
        fault = self._strike("list", [prefix])
        if fault is Fault.LOST_RESPONSE:
            entries = list(self.inner.list(prefix, delimiter=delimiter))
            yield from entries[: self._below(len(entries) + 1)]
            raise StoreError(f"{prefix}: injected: the listing broke off", transient=True, path=prefix)
        yield from self._send(fault, prefix, lambda: self.inner.list(prefix, delimiter=delimiter))

    def delete(self, keys: Iterable[str]) -> None:
        """See `ObjectTier.delete`."""
        several = list(keys)
        fault = self._strike("delete", several)
        name = ", ".join(several[:3])
        if fault is Fault.LATE:
            raise self._keep(name, lambda: self.inner.delete(several))
        self._send(fault, name, lambda: self.inner.delete(several))

    def delete_version(self, key: str, version: Version) -> None:
        """See `ObjectTier.delete_version`."""
        fault = self._strike("delete_version", [key])
        if fault is Fault.LATE:
            raise self._keep(key, lambda: self.inner.delete_version(key, version))
        self._send(fault, key, lambda: self.inner.delete_version(key, version))

    def _strike(self, method: str, keys: Sequence[str]) -> Fault | None:
        """Take the first fault that is due for this call; every other one that might strike it has seen it pass."""
        struck = self._armed.take(lambda planned: planned.matches(method, keys))
        if struck is None:
            return None
        self.fired.append((struck.fault, method, keys[0]))
        if struck.fault is Fault.SLOW:
            self._clock.sleep(struck.seconds)
        return struck.fault

    def _send(self, fault: Fault | None, key: str, send: Callable[[], Answer]) -> Answer:
        """Hand one call on, with the faults that strike every method alike."""
        match fault:
            case Fault.REFUSED:
                raise StoreError(f"{key}: injected: refused", transient=True, path=key)
            case Fault.DENIED:
                raise ReadOnlyError(f"{key}: injected: denied", path=key)
            case Fault.FULL:
                raise CapacityError(f"{key}: injected: full", path=key)
        answer = send()
        if fault is Fault.SHORT_READ:
            raise CorruptionError(f"{key}: injected: cut short", path=key)
        if fault is Fault.LOST_RESPONSE:
            raise StoreError(f"{key}: injected: the response was lost", transient=True, path=key)
        return answer

    def _keep(self, key: str, operation: Callable[[], ObjectInfo | None]) -> StoreError:
        with self._lock:
            self._late.append(operation)
        return StoreError(f"{key}: injected: timed out, and is still under way", transient=True, path=key)

    def _below(self, bound: int) -> int:
        with self._lock:
            return self._random.randrange(bound) if bound else 0

    def _flip(self, buffers: Sequence[memoryview]) -> None:
        bit = self._below(8 * sum(len(buffer) for buffer in buffers))
        for buffer in buffers:
            if bit < 8 * len(buffer):
                buffer[bit // 8] ^= 1 << bit % 8
                return
            bit -= 8 * len(buffer)
