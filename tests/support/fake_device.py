"""A GPU of host memory, whose streams run as late or as early as CUDA's contract allows.

A missing wait shows as wrong bytes under one of the two schedules:

- "trainer first": work on the current stream runs when it is queued. Work on the drain's stream runs when a caller
  waits for it. If a tensor is read in place without a fence, it has changed by that time.
- "drain first": work on other streams runs when it is queued. Work on the current stream runs when a caller waits
  for it. A drain that does not wait for the snapshot copies the bytes from before it.
"""

import copy
import threading

import numpy as np
import torch
import xxhash

from tierfs.device.accelerator import view_of
from tierfs.errors import CapacityError, StoreError

TRAINER_FIRST, DRAIN_FIRST = "trainer first", "drain first"


class Stream:
    def __init__(self):
        self.queue = []
        self.done = 0


class Event:
    def __init__(self, device, stream, at):
        self.device, self.stream, self.at = device, stream, at

    def synchronize(self):
        if threading.current_thread() is not threading.main_thread():
            self.device.may_wait.wait()
        self.device.advance(self.stream, self.at)


class FakeDevice:
    """See the module.

    Args:
        schedule: `TRAINER_FIRST` or the other schedule.
        memory: Total bytes that `allocate` gives out.
        can_pin: Whether host memory can be registered.
    """

    name = "fake device"

    def __init__(self, schedule=TRAINER_FIRST, *, memory=1 << 30, can_pin=True, has_kernels=True):
        self.schedule, self.left, self.can_pin, self.has_kernels = schedule, memory, can_pin, has_kernels
        self.trainer = Stream()
        self.lock = threading.RLock()
        self.owned = {}
        self.pinned = {}
        self.fetched = []
        self.capturing = False
        self.corrupt = False
        self.fetch_error = None
        self.may_wait = threading.Event()  # while a test has it cleared, only the trainer's thread makes progress
        self.may_wait.set()

    # -- for tests -----------------------------------------------------------------------------------------------------

    def own(self, tensor):
        """Treat the memory of this host tensor as device memory."""
        storage = tensor.untyped_storage()
        self.owned[storage.data_ptr()] = storage
        return tensor

    def launch(self, task):
        """Queue a task on the trainer's stream."""
        self._queue(self.trainer, task)

    def synchronize(self):
        self.advance(self.trainer, len(self.trainer.queue))

    @property
    def fetched_bytes(self):
        return sum(self.fetched)

    # -- Accelerator ---------------------------------------------------------------------------------------------------

    def owns(self, tensor):
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return False
        address = storage.data_ptr()
        return bool(address) and address in self.owned

    def allocate(self, length):
        if length > self.left:
            raise CapacityError(f"the fake device has no {length} bytes left", tier="device")
        self.left -= length
        return self.own(torch.full((max(length, 1),), 0xAB, dtype=torch.uint8)[:length])

    def new_stream(self):
        return Stream()

    def current(self):
        return self.trainer

    def record(self, stream):
        return Event(self, stream, len(stream.queue))

    def wait(self, stream, event):
        self._queue(stream, event.synchronize)

    def copy(self, targets, sources):
        for target, source in zip(targets, sources, strict=True):
            self._queue(self.trainer, lambda target=target, source=source: target.copy_(source))

    def gather(self, memory, regions):
        parts = [
            (begin + at, one)
            for begin, each in regions
            for at, one in zip(each.offsets.tolist(), each.tensors, strict=True)
        ]
        self.copy([view_of(memory, at, one) for at, one in parts], [one.detach() for _, one in parts])

    def fetch(self, stream, target, source):
        if self.fetch_error is not None:
            raise copy.copy(self.fetch_error)
        assert target.numel() == source.numel()
        self.fetched.append(target.numel())
        self._queue(stream, lambda: self._fetch(target, source))

    def _fetch(self, target, source):
        target.copy_(source)
        if self.corrupt:
            target[0] ^= 1

    def send(self, target, source):
        self._queue(self.trainer, lambda: target.copy_(source))

    def host_memory(self, length):
        return torch.full((length,), 0xCD, dtype=torch.uint8)

    def touch(self, stream):
        self._queue(stream, lambda: None)

    def hash(self, stream, addresses, lengths):
        blocks, digests = list(zip(addresses.tolist(), lengths.tolist(), strict=True)), []
        self._queue(stream, lambda: digests.extend(xxhash.xxh3_128_digest(_memory(*block)) for block in blocks))
        done = self.record(stream)
        return lambda: (done.synchronize(), b"".join(digests))[1]

    def is_capturing(self):
        return self.capturing

    def is_pinned(self, memory):
        return memory.data_ptr() in self.pinned

    def pin(self, memory):
        if not self.can_pin:
            raise StoreError("the fake driver refuses", tier="device")
        assert memory.data_ptr() not in self.pinned, "registered twice"
        self.pinned[memory.data_ptr()] = memory.numel()

    def unpin(self, memory):
        del self.pinned[memory.data_ptr()]

    # -- streams -------------------------------------------------------------------------------------------------------

    def _queue(self, stream, task):
        with self.lock:
            stream.queue.append(task)
            if (stream is self.trainer) == (self.schedule == TRAINER_FIRST):
                self.advance(stream, len(stream.queue))

    def advance(self, stream, to):
        with self.lock:
            while stream.done < to:
                task = stream.queue[stream.done]
                stream.queue[stream.done] = None
                stream.done += 1
                task()


def _memory(address, length):
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address)) if length else b""
