"""List the checkpoints below a path, with the state of each one."""

import pickle
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.handmade import Handmade, pickled
from support.held_store import held_store

from tierfs.checkpoint.catalog import candidates, natural_key, standing, step_of
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError
from tierfs.format.checkpoint import SaveMark
from tierfs.format.keys import record_key
from tierfs.host.pending.levels import Level
from tierfs.store import delete, load, save
from tierfs.store.commit import Commits
from tierfs.store.write.writer import Writer
from tierfs.testing import flip_bit

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
FILE = "rank-00000-0badcafe.safetensors"


def make(store, directory, name=".metadata", file=FILE, shape=(3, 2)):
    made = Handmade(store, directory)
    made.tensor("w", torch.ones(shape), file)
    made.object("step", pickled(1), file)
    made.save(name)


def look(store, path="", *, is_listed=True):
    """Return the state of each checkpoint. If it is not listed, each file is asked for."""
    found = candidates(store, path)
    return {each.directory: standing(store, each if is_listed else replace(each, listed={})) for each in found}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("run/step_10", 10),
        ("epoch1-step-0200", 200),
        ("epoch=9-step=250-v1.ckpt", 250),
        ("step_5/last", None),
        ("", None),
        ("7", 7),
    ],
)
def test_the_step_is_the_last_number_of_the_name(name, step):
    assert step_of(name) == step


def test_steps_are_sorted_as_numbers():
    assert sorted(["a/10", "a/9", "a/x", "b/1", "a/9b"], key=natural_key) == ["a/9", "a/9b", "a/10", "a/x", "b/1"]


def test_checkpoints_are_found_at_any_depth_and_in_the_order_of_their_steps(store):
    for directory in ("run/step_10", "run/step_9", "run/deep/er/step_1", "other"):
        make(store, directory)
    save(store, "run/notes.txt", b"x")
    assert [candidate.directory for candidate in candidates(store, "")] == [
        "other",
        "run/deep/er/step_1",
        "run/step_9",
        "run/step_10",
    ]
    assert [candidate.directory for candidate in candidates(store, "run/step_9")] == ["run/step_9"]
    assert candidates(store, "nothing") == []


def test_a_complete_checkpoint_is_described(store):
    make(store, "run/step_9")
    found = look(store)["run/step_9"]
    assert (found.state, found.format, found.level) == ("complete", "tierfs", Level.OBJECT)
    assert (found.tensors, found.objects, found.files) == (1, 1, 1)
    assert found.length == 24 + len(pickled(1))
    assert found.created_ns == 1_700_000_000_000_000_000
    assert found.step == 7, "what the checkpoint says itself counts more than its name"


def test_a_checkpoint_at_the_root_of_a_store_is_found(store):
    made = Handmade(store, "x")
    made.tensor("w", torch.ones(2), FILE)
    made.save()
    for name in (FILE, ".metadata"):
        save(store, name, load(store, f"x/{name}"))
    assert look(store)[""].state == "complete"
    assert open_checkpoint(store, "").files() == {FILE: open_checkpoint(store, "x").files()[FILE]}


def test_a_checkpoint_of_torchs_own_writer_is_described(url, store):
    dcp.save({"w": torch.ones(1000), "n": 3}, checkpoint_id=f"tierfs::{url}/run/step_4", no_dist=True)
    found = look(store)["run/step_4"]
    assert (found.state, found.format, found.step, found.tensors, found.objects) == ("complete", "dcp", 4, 1, 1)
    assert 4000 < found.length < 6000
    assert found.created_ns > 0


def test_shard_files_without_metadata_are_an_incomplete_checkpoint(store):
    save(store, f"run/1/{FILE}", b"x")
    save(store, "run/2/__0_0.distcp", b"x")
    save(store, "run/3/model.safetensors", b"x")
    found = look(store)
    assert sorted(found) == ["run/1", "run/2"]
    assert {standing.state for standing in found.values()} == {"incomplete"}
    assert ".metadata is not there" in found["run/1"].missing[0]
    assert (found["run/1"].length, found["run/1"].level) == (None, None)


def test_a_missing_and_a_shorter_file_make_a_checkpoint_incomplete(store):
    make(store, "gone")
    delete(store, f"gone/{FILE}")
    make(store, "short")
    save(store, f"short/{FILE}", load(store, f"short/{FILE}")[:-1])
    make(store, "long")
    save(store, f"long/{FILE}", load(store, f"long/{FILE}") + b"x")
    listed = look(store)
    assert listed["gone"].missing == [f"{FILE} is not there"]
    assert (listed["gone"].state, listed["gone"].level) == ("incomplete", None)
    found = look(store, is_listed=False)
    assert {standing.state for standing in found.values()} == {"incomplete"}
    assert {standing.level for standing in found.values()} == {None}
    assert found["gone"].missing == [f"{FILE} is not there"]
    assert "bytes, not" in found["short"].missing[0]
    assert "bytes, not" in found["long"].missing[0]


def test_a_shorter_file_of_torchs_own_writer_makes_it_incomplete(url, store):
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=f"tierfs::{url}/s", no_dist=True)
    save(store, "s/__0_0.distcp", load(store, "s/__0_0.distcp")[:-1])
    assert look(store, is_listed=False)["s"].state == "incomplete"


class _Calls:
    def __reduce__(self):
        return (exec, ("raise SystemExit('run')",))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"nonsense", pickle.dumps(_Calls()), b"\x80\x04", pickle.dumps({"a": 1})], ids=range(6)
)
def test_damaged_metadata_of_one_checkpoint_leaves_the_others_listed(store, content):
    make(store, "run/step_1")
    make(store, "run/step_2")
    save(store, "run/step_1/.metadata", content)
    found = look(store)
    assert (found["run/step_1"].state, found["run/step_2"].state) == ("damaged", "complete")
    assert found["run/step_1"].format is None
    assert "step_1/.metadata" in found["run/step_1"].damage[0]


def test_a_damaged_record_of_a_file_is_damage_of_its_checkpoint_alone(store):
    make(store, "run/step_1")
    make(store, "run/step_2")
    flip_bit(store.objects, record_key(f"run/step_1/{FILE}"), 100)
    assert {standing.state for standing in look(store).values()} == {"complete"}, "a list does not read it"
    found = look(store, is_listed=False)
    assert (found["run/step_1"].state, found["run/step_2"].state) == ("damaged", "complete")
    assert FILE in found["run/step_1"].damage[0]
    flip_bit(store.objects, record_key("run/step_2/.metadata"), 100)
    assert {standing.state for standing in look(store, is_listed=False).values()} == {"damaged"}
    assert look(store)["run/step_2"].state == "damaged"


def test_shards_that_do_not_make_up_their_tensor_are_damage(store):
    made = Handmade(store, "run/step_1")
    made.tensor("w", torch.ones(4, 2), {FILE: [((0, 0), (2, 2)), ((1, 0), (2, 2))]})
    made.save()
    assert "overlap" in look(store)["run/step_1"].damage[0]
    made = Handmade(store, "run/step_2")
    made.tensor("w", torch.ones(4, 2), {FILE: [((0, 0), (2, 2)), ((3, 0), (1, 2))]})
    made.save()
    assert "2 of its elements are in no shard" in look(store)["run/step_2"].damage[0]


def test_ranks_that_saved_on_their_own_are_one_checkpoint(store):
    made = Handmade(store, "run/5")
    made.tensor("w", torch.ones(2, 2), {FILE: [((0, 0), (1, 2))]})
    made.save("__0.metadata")
    made = Handmade(store, "run/5")
    other = "rank-00001-0badcafe.safetensors"
    made.tensor("w", torch.ones(2, 2), {other: [((1, 0), (1, 2))]})
    made.save("__1.metadata")
    found = look(store)["run/5"]
    assert (found.state, found.tensors, found.files) == ("complete", 1, 2)
    with pytest.raises(InvalidInputError, match="--rank: 0, 1"):
        open_checkpoint(store, "run/5")
    assert open_checkpoint(store, "run/5", rank=1).files().keys() == {other}
    with pytest.raises(NotFoundError, match="rank 2"):
        open_checkpoint(store, "run/5", rank=2)


def test_a_rank_that_saved_on_its_own_and_has_no_metadata_makes_it_incomplete(store):
    made = Handmade(store, "run/5")
    made.tensor("w", torch.ones(2), {FILE: [((0,), (2,))]})
    made.save("__0.metadata")
    save(store, "run/5/rank-00001-0badcafe.safetensors", b"shard")
    found = look(store)["run/5"]
    assert found.state == "incomplete"
    assert found.missing == ["__1.metadata is not there: rank 1 did not finish its save"]


def test_pending_checkpoints_are_listed_with_their_level(tmp_path):
    with held_store(tmp_path) as store:
        make(store, "run/1", shape=(300, 100))
        found = look(store)["run/1"]
        assert (found.state, found.level) == ("complete", Level.STAGED)


def announce(store, directory, sequence):
    """Replace a checkpoint's `.metadata` by an announcement of the same save."""
    data = load(store, f"{directory}/.metadata")
    delete(store, f"{directory}/.metadata")
    mark = SaveMark(sequence, f"{sequence:032x}")
    writer = Writer(store, f"{directory}/.pending/{mark.save_id}", metadata=mark.as_metadata())
    writer.write(data)
    writer.commit()


def test_a_save_that_waits_for_its_parts_is_incomplete_and_says_so(store):
    directory = "run/step_1"
    make(store, directory)
    announce(store, directory, 5)
    found = look(store)[directory]
    assert (found.state, found.tensors, found.step) == ("incomplete", 1, 7)
    assert found.waiting == [f"save {5:032x} is complete, but not published yet"]
    delete(store, f"{directory}/{FILE}")
    found = look(store)[directory]
    assert found.level is None
    assert found.waiting == [f"save {5:032x} waits for 1 of 1 files: {FILE}"]
    assert found.missing[-1] == f"{FILE} is not there"
    Commits(store).advance(directory)
    assert look(store)[directory].state == "incomplete"
    make(store, "y")
    save(store, f"{directory}/{FILE}", load(store, f"y/{FILE}"))
    Commits(store).advance(directory)
    found = look(store)[directory]
    assert (found.state, found.waiting) == ("complete", [])


def test_a_checkpoint_below_a_directory_called_as_those_of_announcements_is_one(store):
    for directory in ("run", "run/.pending", "run/.pending/x"):
        make(store, directory)
    found = look(store)
    assert {directory: (one.state, one.waiting) for directory, one in found.items()} == {
        "run": ("complete", []),
        "run/.pending": ("complete", []),
        "run/.pending/x": ("complete", []),
    }


def test_a_complete_checkpoint_stays_one_while_a_later_save_waits(store):
    make(store, "run/1")
    announce(store, "run/1", 5)
    make(store, "run/1")
    save(store, "run/1/.pending/ab", b"nonsense")
    found = look(store)["run/1"]
    assert found.state == "complete"
    assert "cannot be read" in found.waiting[-1]
    assert len(found.waiting) == 2


def test_a_place_without_a_checkpoint_is_an_error(store):
    with pytest.raises(NotFoundError, match="the path does not exist"):
        open_checkpoint(store, "run/nothing")
    make(store, "run/1")
    with pytest.raises(NotFoundError, match="tierfs checkpoint ls"):
        open_checkpoint(store, "run")
    save(store, "run/1/.metadata", b"{}")
    with pytest.raises(CorruptionError):
        open_checkpoint(store, "run/1")
