"""An object tier with a manual clock, whose listings proceed while others write; and one gc's link to it."""

from dataclasses import replace

from fsspec.implementations.memory import MemoryFileSystem

from tierfs.objects import OVERWRITE, MemoryObjects
from tierfs.objects.protocol import ObjectInfo
from tierfs.objects.wrappers.wrapper import WrappedObjects


class ServedObjects(MemoryObjects):
    """Objects with the times of a manual clock. A listing yields each object as it is at that moment."""

    def __init__(self, root, clock):
        super().__init__(root)
        self._clock = clock
        self.times = {}

    def stamped(self, info):
        return replace(info, modified_ns=self.times.get(info.key, 0))

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        info = super().put(key, data, mode=mode, checksum=checksum)
        self.times[key] = self._clock.now_ns()
        return self.stamped(info)

    def get(self, key, ranges, *, version=None):
        return self.stamped(super().get(key, ranges, version=version))

    def read(self, key, limit):
        data, info = super().read(key, limit)
        return data, self.stamped(info)

    def head(self, key):
        return self.stamped(super().head(key))

    def list(self, prefix, *, delimiter=False):
        if delimiter:
            for item in super().list(prefix, delimiter=True):
                yield self.stamped(item) if isinstance(item, ObjectInfo) else item
            return
        last = ""
        while after := [key for key in list(self.times) if key.startswith(prefix) and key > last]:
            last = min(after)
            if f"{self.root}/{last}" in MemoryFileSystem.store:
                yield self.head(last)


class KilledError(BaseException):
    """The process ended at a step."""


class StepLink(WrappedObjects):
    """The link of one gc to the object tier.

    Counts as a step each request, each answer and each listed object. It runs actions or dies at given steps.
    """

    def __init__(self, inner, actions=None, kill_at=None):
        super().__init__(inner)
        self.steps = 0
        self.log = []
        self._actions = dict(actions or {})
        self._kill_at = kill_at
        self.dead = False

    def step(self, what):
        if self.dead:
            raise KilledError(what)
        self.steps += 1
        self.log.append(what)
        if self.steps == self._kill_at:
            self.dead = True
            raise KilledError(what)
        action = self._actions.pop(self.steps, None)
        if action is not None:
            action()

    def _around(self, request, send):
        self.step(f"{request.method} {request.key}")
        answer = send()
        self.step(f"answer {request.method} {request.key}")
        return answer

    def _around_list(self, request, send):
        if self.dead:
            raise KilledError(request.key)
        for item in send():
            self.step(f"listed {item.key}")
            yield item
