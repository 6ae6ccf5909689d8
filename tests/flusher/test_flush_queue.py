"""The flush queue gives the answers of a search through all drafts, without one."""

from __future__ import annotations

import itertools
from random import Random
from types import SimpleNamespace

import pytest

from tierfs.errors import ConflictError, StoreError
from tierfs.flusher import queue
from tierfs.flusher.queue import FlushItem, FlushQueue, FlushStage

PATHS = ["a", "b", "d/a", "d/b", "d/e/a", "d/e/b", "f/a"]


def item(number, path, *, after=None, base=None, length=10, **what):
    draft = SimpleNamespace(
        path=path,
        length=length,
        slots=[],
        names=[b"chunk%d" % (number % 5)],
        write_id=b"%d" % number,
        after=after,
        base=SimpleNamespace(write_id=base),
    )
    return FlushItem(draft, (1, number, 0), **{"slot": object(), **what})


def before(entries, entry):
    """Yield the drafts that must be published before this one, by a search through all of them."""
    directory = entry.path.rpartition("/")[0]
    for other in entries:
        inside = not directory or other.path.startswith(f"{directory}/") or other.draft.write_id == entry.draft.after
        if other.turn < entry.turn and not other.published and inside:
            yield other


def is_first(entries, entry):
    of_path = any(other.published and other.path == entry.path for other in entries)
    needs = any(other.draft.write_id == entry.draft.after for other in entries)
    directory = entry.path.rpartition("/")[0]
    inside = [other for other in entries if not directory or other.path.startswith(f"{directory}/")]
    return not (of_path or needs or any(other.turn < entry.turn and not other.published for other in inside))


def is_to_be_kept(entries, entry):
    return any(other.conflict and other.draft.write_id in entry.builds_on() for other in entries)


def next_ready(drafts, entries, now):
    for entry in entries:
        if entry.past_nvme and not (drafts.is_busy(entry) or entry.conflict or entry.published or now < entry.retry_at):
            if not entry.uploaded or is_first(entries, entry) or is_to_be_kept(entries, entry):
                return entry
    return None


def dependents(entries, entry):
    found = []
    for other in entries:
        if any(one.draft.write_id in other.builds_on() for one in (entry, *found)):
            found.append(other)
    return found


def check(drafts, now):
    entries = list(drafts)
    assert [entry.turn for entry in entries] == sorted(entry.turn for entry in entries)
    waiting = [entry for entry in entries if not entry.past_nvme and not entry.conflict]
    assert drafts.waiting(3) == waiting[:3]
    assert drafts.last_waiting() == max((entry.turn for entry in entries if not entry.past_nvme), default=None)
    assert drafts.next_ready(now) is next_ready(drafts, entries, now)
    assert drafts.busy == sum(map(drafts.is_busy, entries))
    assert drafts.has_conflicts == any(entry.conflict for entry in entries)
    for entry in entries:
        assert drafts.is_first(entry) == (not entry.published and is_first(entries, entry)) or entry.published
        assert drafts.blocker(entry) is next((other for other in before(entries, entry) if other.conflict), None)
        assert drafts.dependents(entry) == dependents(entries, entry)
        passed = [one for one in before(entries, entry) if one.past_nvme and one.slot is not None and not one.conflict]
        assert drafts.follows_passed(entry) == bool(passed)


@pytest.mark.parametrize("seed", range(12))
def test_the_queue_says_what_a_look_at_each_draft_says(seed):
    rng, drafts, now, numbers = Random(seed), FlushQueue(), 0.0, itertools.count(1)
    for _ in range(400):
        entries = list(drafts)
        now += rng.random()
        what = rng.choice(["add", "add", "persist", "persist", "take", "take", "take", "end", "end", "finish", "rare"])
        idle = [entry for entry in entries if not drafts.is_busy(entry)]
        if what == "add" and len(entries) < 14:
            after = rng.choice([None, None, *(entry.draft.write_id for entry in entries)])
            path = rng.choice(PATHS)
            base = rng.choice([None, *(entry.draft.write_id for entry in entries if entry.path == path)])
            taken = rng.random() < 0.2  # found in the nvme tier
            drafts.add(
                item(
                    next(numbers), path, after=after, base=base, stage=FlushStage.READY if taken else FlushStage.WAITING
                )
            )
        elif what == "persist" and (waiting := drafts.waiting(3)):
            for entry in waiting[: rng.randint(1, 3)]:
                if rng.random() < 0.8:
                    entry.slot = None
                entry.clear()
                drafts.pass_nvme(entry)
        elif what == "take" and (entry := drafts.next_ready(now)) is not None:
            drafts.begin(entry)
        elif what == "end" and (busy := [entry for entry in entries if drafts.is_busy(entry)]):
            entry = rng.choice(busy)
            if rng.random() < 0.3:
                drafts.fail(entry, StoreError("again", transient=True), now + rng.choice([0.0, 1.0, 3.0]))
            else:
                entry.note("uploaded")
                drafts.clear(entry)
                if drafts.is_first(entry):
                    drafts.pass_on(entry)
            drafts.end(entry)
        elif what == "finish" and (done := [entry for entry in idle if entry.published]):
            entry = rng.choice(done)
            if rng.random() < 0.8:
                drafts.remove(entry)
            else:
                drafts.fail(entry, StoreError("again", transient=True), now + 1.0)
                drafts.take_back(entry)
        elif what == "rare" and idle:
            entry = rng.choice(idle)
            step = rng.choice(["conflict", "discard", "hasten", "clear"])
            if step == "conflict" and not entry.published:
                drafts.fail(entry, ConflictError("theirs stands"), float("inf"))
            elif step == "discard" and entry.conflict:
                drafts.remove(entry)
            elif step == "hasten" and not entry.conflict:
                drafts.hasten(entry)
            elif step == "clear":
                drafts.clear(entry)
        check(drafts, now)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_draft_is_looked_at_when_the_one_it_builds_on_is_found_to_be_in_conflict(is_first):
    # As an earlier flusher left them: this one may find the base after the draft that builds on it.
    drafts = FlushQueue()
    base = item(1, "d/a", slot=None, stage=FlushStage.READY)
    base.fail(ConflictError("theirs stands"), float("inf"))
    built_on_it = item(2, "d/a", base=b"1", slot=None, stage=FlushStage.UPLOADED)
    before = item(0, "d/b", stage=FlushStage.UPLOADED)
    drafts.add(before)
    drafts.begin(before)
    for entry in (base, built_on_it) if is_first else (built_on_it, base):
        assert drafts.next_ready(0.0) is None
        drafts.add(entry)
    assert drafts.next_ready(0.0) is built_on_it
    assert drafts.kept_base(built_on_it) is base
    drafts.remove(base)
    assert drafts.next_ready(0.0) is None


def test_a_draft_that_is_found_late_goes_on_when_a_later_one_is_taken_back():
    # Both drafts change one path. The record of the later one is published, but its local copies cannot be released.
    drafts = FlushQueue()
    later, early = (item(number, "d/b", slot=None, stage=FlushStage.UPLOADED) for number in (2, 1))
    drafts.add(later)
    drafts.begin(later)
    drafts.pass_on(later)
    drafts.end(later)
    drafts.add(early)
    assert drafts.next_ready(0.0) is None
    drafts.fail(later, StoreError("again", transient=True), 1.0)
    drafts.take_back(later)
    assert drafts.next_ready(0.0) is early


class Counted(FlushItem):
    """Count every access to an attribute of a draft."""

    __slots__ = ()
    looks = 0

    def __getattribute__(self, name):
        Counted.looks += 1
        return super().__getattribute__(name)


def looks_of(step):
    Counted.looks = 0
    step()
    return Counted.looks


def fill(count, **what):
    drafts = FlushQueue()
    for number in range(count):
        entry = item(number, f"run/d{number % 7}/f{number}", slot=None, stage=FlushStage.READY)
        for name, value in what.items():
            setattr(entry, name, value)
        entry.__class__ = Counted
        drafts.add(entry)
    return drafts


@pytest.mark.parametrize(
    "what",
    [{"retry_at": 1e9}, {"stage": FlushStage.UPLOADED}, {"stage": FlushStage.UPLOADED, "retry_at": 1e9}, {}],
    ids=str,
)
def test_a_step_looks_at_as_few_drafts_of_many_as_of_few(what):
    found = []
    for count in (200, 2000):
        drafts = fill(count, **what)
        drafts.next_ready(0.0)  # finds the drafts that have to wait, once

        def step(drafts=drafts, number=count):
            entry = item(number, "run/d3/new")
            drafts.add(entry)
            drafts.follows_passed(entry)
            drafts.waiting(100)
            drafts.blocker(entry)
            entry.slot = None
            drafts.pass_nvme(entry)
            ready = drafts.next_ready(0.0)
            if ready is not None:
                drafts.begin(ready)
                drafts.end(ready)
            drafts.remove(entry)

        found.append(looks_of(step))
    few, many = found
    assert many <= few + 60  # a binary search takes some more steps


def test_large_drafts_that_are_not_past_the_nvme_tier_are_known():
    drafts, least = FlushQueue(), queue.LARGE_BYTES_MIN
    lengths = enumerate((least - 1, least, 5 * least))
    small, large, other = (item(number, f"f{number}", length=length) for number, length in lengths)
    for entry in (small, large, other):
        drafts.add(entry)
    assert list(drafts.large.values()) == [large, other]
    drafts.begin(large)
    assert list(drafts.large.values()) == [other]
    drafts.pass_nvme(large)
    assert drafts.next_ready(0.0) is None  # a thread works on it
    drafts.end(large)
    assert drafts.next_ready(0.0) is large
