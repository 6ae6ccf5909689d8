"""An object tier that fails on demand, and damage to objects, so that tests can use faults as ordinary inputs.

The plan and the order of calls decide which fault strikes which call. The seed decides where bits flip and writes tear.
So a run can be repeated exactly.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

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

Answer = TypeVar("Answer")
APlanned = TypeVar("APlanned")


class ArmedFaults(Generic[APlanned]):
    """Faults in the order of their plan. Each strikes once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[APlanned, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, planned: APlanned, after: int) -> None:
        """Plan one more fault, which lets ``after`` matching calls pass before it strikes."""
        with self._lock:
            self._waiting.append((planned, after))

    def clear(self) -> None:
        """Forget the faults that have not struck yet."""
        with self._lock:
            self._waiting.clear()

    def take(self, might_strike: Callable[[APlanned], bool]) -> APlanned | None:
        """Take the first due fault that might strike a call. All other faults that might strike it count the call."""
        taken: APlanned | None = None
        with self._lock:
            waiting = []
            for planned, left in self._waiting:
                is_possible = might_strike(planned)
                if is_possible and not left and taken is None:
                    taken = planned
                else:
                    waiting.append((planned, max(0, left - is_possible)))
            self._waiting = waiting
        return taken


class Fault(enum.Enum):
    """The kinds of faults."""

    REFUSED = "refused"
    """The call has no effect and raises a transient `StoreError`."""
    DENIED = "denied"
    """The call has no effect and raises `ReadOnlyError`."""
    FULL = "full"
    """The put stores nothing and raises `CapacityError`."""
    LOST_RESPONSE = "lost-response"
    """The call takes effect, then raises a transient `StoreError`. A listing breaks off part of the way through."""
    LATE = "late"
    """The call raises a transient `StoreError`. It takes effect when `FaultyObjects.deliver_late` is called."""
    TORN = "torn"
    """The put stores the first part of the object, then raises a `StoreError` that is not transient."""
    BIT_FLIP = "bit-flip"
    """The call returns data with one bit flipped, and raises nothing."""
    SHORT_READ = "short-read"
    """The call raises `CorruptionError`, as if the object were too short."""
    SLOW = "slow"
    """The call takes effect after a long wait."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that this fault can strike."""
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
    """One fault, and the call that it strikes.

    Attributes:
        fault: The kind.
        method: The method to strike; None for any that the fault can strike.
        after: Number of matching calls that pass before the fault strikes.
        key_part: Strike only calls with this text in their key, their prefix or one of their keys.
        seconds: Duration of the wait of `Fault.SLOW`.
    """

    fault: Fault
    method: str | None = None
    after: int = 0
    key_part: str = ""
    seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse a fault that can never strike.

        Raises:
            InvalidInputError: The fault cannot strike ``method``.
        """
        if self.method is not None and self.method not in self.fault.methods:
            raise InvalidInputError(f"{self.fault.value} cannot strike {self.method}: only {self.fault.methods}")

    def matches(self, method: str, keys: Sequence[str]) -> bool:
        """Whether the fault might strike this call."""
        wanted = self.fault.methods if self.method is None else (self.method,)
        return method in wanted and any(self.key_part in key for key in keys)


class FaultyObjects(WrappedObjects):
    """An object tier in which planned faults strike. It passes all other calls on. Thread-safe.

    The first planned fault that is due strikes a call. Each fault strikes once. It strikes a listing when the caller
    asks for the first entry.

    Args:
        plan: The first faults.
        seed: Decides where bits flip and writes tear. ``repr`` shows it.
        clock: Used for the waits of `Fault.SLOW`; by default a `ManualClock`, which does not really wait.

    Attributes:
        fired: The faults that struck, in order: fault, method and key. The key of a listing is its prefix, that of a
            deletion its first key.
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
        self._armed = ArmedFaults[PlannedFault]()
        for planned in plan:
            self._armed.add(planned, planned.after)
        self._late: list[Callable[[], ObjectInfo | None]] = []

    def __repr__(self) -> str:
        return f"FaultyObjects({self.inner!r}, seed={self.seed}, pending={self.pending}, late={self.late})"

    def inject(
        self, fault: Fault, *, method: str | None = None, after: int = 0, key_part: str = "", seconds: float = 60.0
    ) -> None:
        """Plan one more fault. The arguments are those of `PlannedFault`."""
        self._armed.add(PlannedFault(fault, method, after, key_part, seconds), after)

    def clear(self) -> None:
        """Forget the faults that have not struck yet. Late operations stay in flight."""
        self._armed.clear()

    @property
    def pending(self) -> int:
        """Number of faults that have not struck yet."""
        return len(self._armed)

    @property
    def late(self) -> int:
        """Number of late operations that are still in flight."""
        return len(self._late)

    def deliver_late(self) -> list[ObjectInfo | TierfsError | None]:
        """Let every late operation take effect, in the order in which they were sent.

        Returns:
            The result or the error of each operation. Its caller no longer waits for it.
        """
        with self._lock:
            late, self._late = self._late, []
        outcomes: list[ObjectInfo | TierfsError | None] = []
        for operation in late:
            try:
                outcomes.append(operation())
            except TierfsError as error:  # noqa: PERF203 - one failure must not stop the others
                outcomes.append(error)
        return outcomes

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        fault = self._strike("put", [key])
        if fault is Fault.LATE:
            kept = [bytes(piece) for piece in data]  # the call only borrows the caller's buffers
            raise self._keep(key, lambda: self.inner.put(key, kept, mode=mode, checksum=checksum))
        if fault is Fault.TORN:
            content = b"".join(data)
            part = content[: self._below(len(content))]
            self.inner.put(key, [part], mode=mode)
            raise StoreError(f"{key}: injected: torn after {len(part)} of {len(content)} bytes", path=key)
        return self._send(fault, key, lambda: self.inner.put(key, data, mode=mode, checksum=checksum))

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        fault = self._strike("get", [key])
        info = self._send(fault, key, lambda: self.inner.get(key, ranges, version=version))
        if fault is Fault.BIT_FLIP:
            self._flip([out for _, out in ranges])
        return info

    def stream(self, key: str, length: int, use: Use) -> None:
        """See `ObjectTier.stream`. Faults of ``get`` strike it."""
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
        fault = self._strike("read", [key])
        content, info = self._send(fault, key, lambda: self.inner.read(key, limit))
        if fault is Fault.BIT_FLIP:
            flipped = bytearray(content)
            self._flip([memoryview(flipped)])
            content = bytes(flipped)
        return content, info

    def head(self, key: str) -> ObjectInfo:
        return self._send(self._strike("head", [key]), key, lambda: self.inner.head(key))

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        fault = self._strike("list", [prefix])
        if fault is Fault.LOST_RESPONSE:
            entries = list(self.inner.list(prefix, delimiter=delimiter))
            yield from entries[: self._below(len(entries) + 1)]
            raise StoreError(f"{prefix}: injected: the listing broke off", transient=True, path=prefix)
        yield from self._send(fault, prefix, lambda: self.inner.list(prefix, delimiter=delimiter))

    def list_after(self, prefix: str, after: str) -> Sequence[ObjectInfo]:
        return self._send(self._strike("list", [prefix]), prefix, lambda: self.inner.list_after(prefix, after))

    def delete(self, keys: Iterable[str]) -> None:
        several = list(keys)
        fault = self._strike("delete", several)
        name = ", ".join(several[:3])
        if fault is Fault.LATE:
            raise self._keep(name, lambda: self.inner.delete(several))
        self._send(fault, name, lambda: self.inner.delete(several))

    def delete_version(self, key: str, version: Version) -> None:
        fault = self._strike("delete_version", [key])
        if fault is Fault.LATE:
            raise self._keep(key, lambda: self.inner.delete_version(key, version))
        self._send(fault, key, lambda: self.inner.delete_version(key, version))

    def _strike(self, method: str, keys: Sequence[str]) -> Fault | None:
        """Take the first fault that is due for this call. Wait if it is `Fault.SLOW`."""
        struck = self._armed.take(lambda planned: planned.matches(method, keys))
        if struck is None:
            return None
        self.fired.append((struck.fault, method, keys[0]))
        if struck.fault is Fault.SLOW:
            self._clock.sleep(struck.seconds)
        return struck.fault

    def _send(self, fault: Fault | None, key: str, send: Callable[[], Answer]) -> Answer:
        """Send one call, with the faults that strike all methods in the same way."""
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
        return StoreError(f"{key}: injected: timed out, and is still in flight", transient=True, path=key)

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


def flip_bit(tier: ObjectTier, key: str, bit: int) -> None:
    """Flip one bit of an object. The object gets a new version, as with all functions here.

    Args:
        tier: Holds the object.
        bit: 0 is the lowest bit of the first byte.
    """
    content = bytearray(_whole(tier, key))
    content[bit // 8] ^= 1 << bit % 8
    tier.put(key, [content])


def truncate(tier: ObjectTier, key: str, size: int) -> None:
    """Keep only the first ``size`` bytes of the object."""
    tier.put(key, [_whole(tier, key)[:size]])


def swap(tier: ObjectTier, key: str, other: str) -> None:
    """Swap the contents of two objects."""
    content, other_content = _whole(tier, key), _whole(tier, other)
    tier.put(key, [other_content])
    tier.put(other, [content])


def remove(tier: ObjectTier, key: str) -> None:
    """Delete an object.

    Raises:
        NotFoundError: There is no such object, so deleting it would be no damage.
    """
    tier.head(key)
    tier.delete([key])


def _whole(tier: ObjectTier, key: str) -> bytes:
    return tier.read(key, tier.head(key).size)[0]
