"""Shard files of a replaced save in the same directory are deleted one grace later. All other files stay."""

import json
import time
import uuid

import fsspec
import pytest
from support.saving import descriptor_for

import tierfs
from tierfs.clock import ManualClock
from tierfs.format.checkpoint import ROOT, SaveMark
from tierfs.objects import MemoryObjects
from tierfs.store import find, load
from tierfs.store.announced import PENDING
from tierfs.store.commit import PART, PART_IN_PLACE, Commits
from tierfs.store.store import Store
from tierfs.store.write.writer import Writer
from tierfs.testing import Fault, FaultyObjects

GRACE_S = 3600  # as in `descriptor_for`


def put(store, path, metadata=PART):
    writer = Writer(store, path, metadata=metadata)
    writer.write(path.encode() * 100)
    writer.commit()


def document(*names):
    return json.dumps({"files": {name: {"length": 1} for name in names}}).encode()


class Trainer:
    """Save to the directory ``last``, straight to the object tier."""

    def __init__(self, objects):
        self.clock = ManualClock()
        self.store = Store(objects, descriptor_for(objects), url="store", clock=self.clock)
        self.saves = 0

    def save(self, *, part=PART):
        self.saves += 1
        name = f"shard-{self.saves}"
        put(self.store, f"last/{name}", part)
        commits = Commits(self.store)
        commits.publish(f"last/{ROOT}", document(name), SaveMark(self.saves, "ab"))
        commits.note_published("last")

    def files(self):
        return {entry.path.removeprefix("last/") for entry in find(self.store, "last") if not entry.is_directory}


@pytest.fixture
def objects():
    return MemoryObjects(f"/replaced-{uuid.uuid4().hex}")


@pytest.fixture
def trainer(objects):
    return Trainer(objects)


@pytest.mark.parametrize("part", [PART, PART_IN_PLACE])
def test_files_of_replaced_saves_go_one_grace_later(trainer, part):
    for _ in range(3):
        trainer.save(part=part)
        trainer.clock.sleep(1)
    assert trainer.files() == {ROOT, "shard-1", "shard-2", "shard-3"}
    trainer.clock.sleep(GRACE_S)
    trainer.save(part=part)
    assert trainer.files() == {ROOT, "shard-3", "shard-4"}
    assert load(trainer.store, "last/shard-3") == b"last/shard-3" * 100


def test_a_directory_that_is_saved_to_for_ever_holds_what_a_grace_takes(trainer):
    for _ in range(40):
        trainer.save()
        trainer.clock.sleep(GRACE_S / 4)
    assert len(trainer.files()) <= 7


def test_a_file_is_readable_for_a_grace_after_it_was_replaced(trainer):
    trainer.save()
    trainer.save()
    for _ in range(5):
        trainer.clock.sleep((GRACE_S - 1) / 5)
        trainer.save()
        assert load(trainer.store, "last/shard-1") == b"last/shard-1" * 100


def test_files_that_no_save_wrote_stay(trainer):
    put(trainer.store, "last/config.json", {})
    put(trainer.store, "last/sub/shard-0", PART)
    for _ in range(4):
        trainer.save()
        trainer.clock.sleep(GRACE_S)
    assert {"config.json", "sub/shard-0", ROOT} <= trainer.files()


def test_files_of_a_save_that_waits_for_others_stay(trainer, objects):
    put(trainer.store, "last/of-two")
    Commits(trainer.store).announce("last", document("of-two", "missing"), SaveMark(1000, "cd"))
    for _ in range(4):
        trainer.save()
        trainer.clock.sleep(GRACE_S)
    assert "of-two" in trainer.files()
    put(trainer.store, "last/missing")
    assert Commits(trainer.store).advance("last") == []
    assert load(trainer.store, f"last/{ROOT}") == document("of-two", "missing")
    assert not [path for path in trainer.files() if path.startswith(PENDING)]


def test_a_process_that_begins_anew_waits_a_grace_again(trainer, objects):
    trainer.save()
    trainer.save()
    again = Trainer(objects)
    again.saves = 2
    again.clock.sleep(2 * GRACE_S)
    again.save()
    assert {"shard-1", "shard-2", "shard-3"} <= again.files()
    again.clock.sleep(GRACE_S)
    again.save()
    assert again.files() == {ROOT, "shard-3", "shard-4"}


def test_metadata_of_no_save_removes_nothing(trainer):
    trainer.save()
    for _ in range(3):
        put(trainer.store, f"last/{ROOT}", {})
        Commits(trainer.store).note_published("last")
        trainer.clock.sleep(GRACE_S)
    assert "shard-1" in trainer.files()


@pytest.mark.parametrize("method", ["list", "put"])
def test_a_save_stands_where_what_it_replaced_cannot_be_removed(objects, method):
    faulty = FaultyObjects(objects)
    trainer = Trainer(faulty)
    trainer.save()
    trainer.save()
    trainer.clock.sleep(GRACE_S)
    commits = Commits(trainer.store)
    put(trainer.store, "last/shard-3")
    commits.publish(f"last/{ROOT}", document("shard-3"), SaveMark(3, "ab"))
    faulty.inject(Fault.REFUSED, method=method)
    commits.note_published("last")
    trainer.saves = 3
    assert load(trainer.store, f"last/{ROOT}") == document("shard-3")
    trainer.save()
    assert "shard-1" not in trainer.files()


def test_overwriting_a_directory_by_torch_keeps_what_two_graces_take(tmp_path, monkeypatch):
    # Through the flusher, with the shortest grace; sleeps for two seconds.
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import torch.distributed.checkpoint as dcp

    from tierfs.dcp import TierReader, TierWriter

    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    tierfs.init(f"file://{tmp_path}/store", lease_s=1, grace_s=2)
    where = f"tierfs::file://{tmp_path}/store/last"
    state = {"weight": torch.zeros(1000)}
    for step in range(6):
        state["weight"].fill_(step)
        writer = TierWriter(where, ack="staged")
        dcp.save(state, storage_writer=writer, no_dist=True)
        writer.wait("object")
        time.sleep(0 if step < 2 else 0.7)
    fs, path = fsspec.url_to_fs(where)
    assert len(fs.find(path)) < 6
    dcp.load(state, storage_reader=TierReader(where), no_dist=True)
    assert bool((state["weight"] == 5).all())
