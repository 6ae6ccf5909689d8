"""Repair of chunks that serve as bases."""

import uuid

import pytest
from support.damaging import LOOK, run
from support.saving import Flushing, Training

from tierfs.format import keys
from tierfs.objects import MemoryObjects
from tierfs.store import Store, load, save, verify
from tierfs.store.maintenance.repair_chunks import Healer
from tierfs.store.maintenance.scrub import scrub
from tierfs.testing.damage import flip_bit, remove, truncate


class Steps:
    """A file that was saved twice. Its chunks are encoded against chunks that no file names."""

    def __init__(self, seed):
        self.objects = MemoryObjects(f"/bases-{uuid.uuid4().hex}")
        self.flushing = Flushing(self.objects)
        training = Training(1 << 18, seed=seed)
        self.first = training.file()
        self.flushing.save("a", self.first)
        self.copy = MemoryObjects(f"/copy-{uuid.uuid4().hex}")
        for item in list(self.objects.list("")):
            self.copy.put(item.key, [self.objects.read(item.key, 1 << 30)[0]])
        self.data = training.step().file()
        rows = self.flushing.save("a", self.data)
        self.row = max((row for row in rows if row.bases), key=lambda row: row.stored_length)
        self.key, self.base = keys.chunk_key(self.row.name), keys.chunk_key(self.row.bases[0])

    def replica(self):
        """Return a copy of the store from before the second save."""
        return Store(self.copy, self.flushing.descriptor, url="replica", clock=self.flushing.clock)


@pytest.fixture(params=[0, 3])
def steps(request):
    """Two saves whose base key sorts before the delta's key or, for the other parameter, after it."""
    found = Steps(request.param)
    assert (found.base < found.key) == (request.param == 3)
    return found


def test_a_chunk_is_no_loss_where_its_base_is_healed(steps):
    flip_bit(steps.objects, steps.base, 8 * 20 + 1)
    scrub(steps.flushing.bare(), LOOK)
    would = run(steps.flushing.bare(), dry_run=True, replicas=[steps.replica()])
    assert ([each.key for each in would.mended], would.is_whole) == ([steps.base], True)
    assert [(each.key, each.how) for each in would.left] == [
        (steps.key, "a run without --dry-run heals the base, then checks this")
    ]
    report = run(steps.flushing.bare(), replicas=[steps.replica()])
    assert [each.key for each in report.mended] == [steps.base]
    assert (report.left, report.lost) == ([], [])
    assert verify(steps.flushing.bare()).damage == []


@pytest.mark.parametrize("damage", [remove, lambda objects, key: truncate(objects, key, 500)])
def test_a_base_that_no_file_names_is_healed(steps, damage):
    damage(steps.objects, steps.base)
    scrub(steps.flushing.bare(), LOOK)
    report = run(steps.flushing.bare(), replicas=[steps.replica()])
    assert [(each.key, each.how) for each in report.mended] == [(steps.base, "replica")]
    assert (report.left, report.lost) == ([], [])
    assert load(steps.flushing.bare(), "a") == steps.data


def test_a_base_is_not_stored_under_another_name(steps, monkeypatch):
    monkeypatch.setattr(Healer, "_encoded_anew", lambda *_: None)
    other = Flushing(MemoryObjects(f"/other-{uuid.uuid4().hex}"), codecs="off").store
    save(other, "a", steps.first)
    remove(steps.objects, steps.base)
    report = run(steps.flushing.bare(), replicas=[other])
    assert report.mended == []
    assert [each.path for each in report.lost] == ["a"]
