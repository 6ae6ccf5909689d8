"""A state machine drives a faulty tier, and a model predicts the contents that each key may have."""

from __future__ import annotations

import uuid

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierfs.clock import ManualClock
from tierfs.errors import AlreadyExistsError, NotFoundError, StoreError
from tierfs.objects import CREATE, OVERWRITE, MemoryObjects, RetryingObjects
from tierfs.testing import Fault, FaultyObjects

KEYS = st.sampled_from(["a", "run/b"])
FAULTS = st.sampled_from([Fault.REFUSED, Fault.LOST_RESPONSE, Fault.LATE])


class FaultyTier(RuleBasedStateMachine):
    """Whatever fails, a key holds nothing, or the content of a put that was not refused for good."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryObjects(f"/stateful-{uuid.uuid4().hex}")
        self.faulty = FaultyObjects(self.memory)
        self.objects = RetryingObjects(self.faulty, attempts=2, clock=ManualClock())
        self.possible: dict[str, set[bytes | None]] = {}
        self.late: dict[str, set[bytes | None]] = {}

    def _may_be(self, key: str) -> set[bytes | None]:
        return self.possible.setdefault(key, {None})

    @rule(fault=FAULTS, method=st.sampled_from(["put", "delete"]), after=st.integers(0, 2))
    def plan(self, fault: Fault, method: str, after: int) -> None:
        self.faulty.inject(fault, method=method, after=after)

    @rule(key=KEYS, content=st.binary(max_size=4), create=st.booleans())
    def put(self, key: str, content: bytes, create: bool) -> None:
        fired, late = len(self.faulty.fired), self.faulty.late
        try:
            self.objects.put(key, [content], mode=CREATE if create else OVERWRITE)
        except (AlreadyExistsError, StoreError):
            if len(self.faulty.fired) == fired:
                assert None not in self._may_be(key)
            else:
                self._may_be(key).add(content)
        else:
            self.possible[key] = {content}
        if self.faulty.late > late:
            self.late.setdefault(key, set()).add(content)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        late = self.faulty.late
        try:
            self.objects.delete([key])
        except StoreError:
            self._may_be(key).add(None)
        else:
            self.possible[key] = {None}
        if self.faulty.late > late:
            self.late.setdefault(key, set()).add(None)

    @rule()
    def deliver(self) -> None:
        self.faulty.deliver_late()
        for key, contents in self.late.items():
            self._may_be(key).update(contents)
        self.late.clear()

    @invariant()
    def every_key_holds_what_it_may(self) -> None:
        for key in self.possible:
            found: bytes | None
            try:
                found = self.memory.read(key, 4)[0]
            except NotFoundError:
                found = None
            assert found in self.possible[key]
            self.possible[key] = {found}

    def teardown(self) -> None:
        self.memory.delete([listed.key for listed in self.memory.list("")])


FaultyTier.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None, print_blob=True)
TestFaultyTier = FaultyTier.TestCase
