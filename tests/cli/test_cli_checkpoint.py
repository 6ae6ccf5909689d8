"""``checkpoint``: list, show, verify, compare, export and import, with the exit codes and messages of each."""

import errno
import itertools
import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

from tierfs.cli import main
from tierfs.dcp import TierWriter
from tierfs.format.checkpoint import SaveMark
from tierfs.format.keys import chunk_key
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.store import delete, find, load, save, stat
from tierfs.store.commit import Commits
from tierfs.testing import flip_bit
from tierfs.train import Every, Manager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    """A host without local tiers."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_RAM", "0")
    monkeypatch.setenv("TIERFS_NVME", "0")


def state(seed=0):
    torch.manual_seed(seed)
    return {
        "model": {"w": torch.randn(300, 100), "b": torch.arange(5).bfloat16()},
        "groups": [{"lr": torch.tensor(0.5)}],
        "step": 3,
    }


def save_state(url, value):
    dcp.save(value, storage_writer=TierWriter(url, ack="object"), no_dist=True)


@pytest.fixture
def step_10(url):
    save_state(f"{url}/run/step_10", state())
    return f"{url}/run/step_10"


# -- ls ----------------------------------------------------------------------------------------------------------------


def test_names_do_not_change_the_order_of_steps(url, store, told):
    for name in ("best_30", "step_10", "final", "warm_2", "old/step_1"):
        save(store, f"run/{name}/__0_0.distcp", b"x")
    listed = told("checkpoint", "ls", f"{url}/run")["checkpoints"]
    assert [item["name"] for item in listed] == ["final", "warm_2", "step_10", "best_30", "old/step_1"]


def test_checkpoints_are_listed_in_the_order_of_their_steps(url, step_10, store, told, tell):
    save_state(f"{url}/run/step_9", state())
    dcp.save(state(), checkpoint_id=f"{url}/run/step_11", no_dist=True)
    save(store, "run/step_12/__0_0.distcp", b"x")
    listed = told("checkpoint", "ls", f"{url}/run")["checkpoints"]
    assert [(item["name"], item["step"], item["state"], item["format"]) for item in listed] == [
        ("step_9", 9, "complete", "tierfs"),
        ("step_10", 10, "complete", "tierfs"),
        ("step_11", 11, "complete", "dcp"),
        ("step_12", 12, "incomplete", None),
    ]
    assert listed[0].keys() == {
        "name", "step", "state", "level", "size", "stored", "new", "shared", "freed", "tensors", "objects", "files", "format",
        "kind", "created", "problems", "waiting", "logged_steps",
    }  # fmt: skip
    assert (listed[0]["level"], listed[0]["tensors"], listed[0]["problems"]) == ("object", 3, [])
    assert listed[0]["size"] > 120_000
    lines = tell("checkpoint", "ls", f"{url}/run").splitlines()
    assert lines[0].split() == "step state level size tensors files format kind created name".split()
    assert lines[1].split()[:3] == ["9", "complete", "object"]
    assert ".metadata is not there" in lines[5]
    assert [item["name"] for item in told("checkpoint", "ls", f"{url}/run", "--limit", "2")["checkpoints"]] == [
        "step_11",
        "step_12",
    ]
    assert told("checkpoint", "ls", f"{url}/run", "--limit", "0")["checkpoints"] == []
    assert [item["name"] for item in told("checkpoint", "ls", step_10)["checkpoints"]] == ["step_10"]


def test_checkpoint_ls_shows_shared_and_freed_bytes(url, store, told, tell):
    frozen = state()
    save_state(f"{url}/run/step_1", frozen)
    save_state(f"{url}/run/step_2", {**frozen, "extra": torch.randn(100_000)})
    save_state(f"{url}/elsewhere/step_1", frozen)
    first, second = told("checkpoint", "ls", f"{url}/run")["checkpoints"]
    costs = ("stored", "new", "shared", "freed")
    assert [item[name] for item in (first, second) for name in costs] == [None] * 8
    document = told("checkpoint", "ls", f"{url}/run", "--usage")
    assert document["requests"]["list"] >= 2
    first, second = document["checkpoints"]
    assert 50_000 < first["stored"] < first["size"] + 20_000
    assert first["stored"] == first["shared"] + first["freed"]
    # The other run has all of these tensors, too.
    assert first["freed"] < 20_000 < first["shared"]
    assert second["freed"] > 200_000
    # A step stores first what no earlier one has.
    assert first["new"] == first["stored"]
    assert second["stored"] - first["shared"] <= second["new"] < second["stored"]
    lines = tell("checkpoint", "ls", f"{url}/run", "--usage").splitlines()
    assert lines[0].split()[3:8] == ["size", "stored", "new", "shared", "freed"]
    assert len({line.rindex("  step_") for line in lines[1:]} | {lines[0].rindex("  name")}) == 1
    # Without the other run, less of this checkpoint is shared.
    delete(store, "elsewhere/step_1/.metadata")
    for item in find(store, "elsewhere/step_1"):
        delete(store, item.path)
    (alone, _) = told("checkpoint", "ls", f"{url}/run", "--usage")["checkpoints"]
    assert alone["stored"] == first["stored"]
    assert alone["shared"] < first["shared"]


def test_a_checkpoint_that_tierfs_did_not_write_costs_its_files(url, tmp_path, told):
    theirs = tmp_path / "store" / "run" / "step_1"
    dcp.save(state(), checkpoint_id=theirs, no_dist=True)
    (item,) = told("checkpoint", "ls", f"{url}/run", "--usage")["checkpoints"]
    size = sum(path.stat().st_size for path in theirs.iterdir())
    assert (item["format"], item["stored"], item["shared"], item["freed"]) == ("dcp", size, 0, size)


def test_a_damaged_checkpoint_is_listed_beside_the_others_and_is_exit_code_6(url, step_10, store, told, tell):
    save_state(f"{url}/run/step_9", state())
    save(store, "run/step_9/.metadata", b"{}")
    listed = told("checkpoint", "ls", url, code=6)["checkpoints"]
    assert [(item["name"], item["state"]) for item in listed] == [
        ("run/step_9", "damaged"),
        ("run/step_10", "complete"),
    ]
    assert "step_9/.metadata" in listed[0]["problems"][0]
    assert "  file://" in tell("checkpoint", "ls", url, code=6)


def test_a_place_without_checkpoints_says_so_or_is_an_error(url, store, told, tell, capsys):
    save(store, "run/notes", b"x")
    assert told("checkpoint", "ls", f"{url}/run")["checkpoints"] == []
    assert tell("checkpoint", "ls", f"{url}/run") == ""
    assert main(["checkpoint", "ls", f"{url}/run"]) == 0
    assert f"no checkpoint is in {url}/run: `tierfs ls -R {url}/run` lists its files" in capsys.readouterr().err
    assert told("checkpoint", "ls", f"{url}/nothing", code=3)["error"]["kind"] == "not-found"


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_names_tensors_and_where_they_lie(step_10, told, tell):
    found = told("checkpoint", "show", step_10)
    assert (found["step"], found["format"], found["rank"]) == (10, "tierfs", None)
    assert [
        (item["name"], item["dtype"], item["shape"], item["size"], item["shards"]) for item in found["tensors"]
    ] == [
        ("groups.0.lr", "float32", [], 4, 1),
        ("model.b", "bfloat16", [5], 10, 1),
        ("model.w", "float32", [300, 100], 120_000, 1),
    ]
    assert [item["name"] for item in found["objects"]] == ["step"]
    found = told("checkpoint", "show", step_10, "*.w", "--shards")
    ((shard,),) = [item["shards"] for item in found["tensors"]]
    assert found["objects"] == []
    assert (shard["offsets"], shard["shape"], shard["length"]) == ([0, 0], [300, 100], 120_000)
    assert (shard["level"], shard["tiers"]) == ("object", ["object"])
    text = tell("checkpoint", "show", step_10, "--shards")
    assert "bfloat16  [5]         model.b\n    at [0]  [5]  rank-00000-" in text
    assert text.endswith("object    -           step\n")


def test_show_tells_what_a_tier_of_this_host_holds(url, monkeypatch, tmp_path):
    from tierfs.cli.commands._checkpoint_content import Placement
    from tierfs.dcp.checkpoint import open_checkpoint

    monkeypatch.setenv("TIERFS_SHM_DIR", str(tmp_path))
    options = {"ram": "64MiB", "nvme": "0", "state_dir": str(tmp_path / "other")}
    dcp.save(state(), storage_writer=TierWriter(f"{url}/run/1", ack="object", **options), no_dist=True)
    opened, path = open_store(replace(parse_url(f"{url}/run/1"), tiers=TierOptions(**options)))
    try:
        checkpoint = open_checkpoint(opened, path)
        (shard,) = checkpoint.shards("model.w")
        load(opened, f"{path}/{shard.place.file}")
        assert Placement(checkpoint).tiers(shard.place) == ["ram", "object"]
    finally:
        opened.tiers.close()


def test_show_tells_how_tensors_are_encoded_and_why(url, monkeypatch, tmp_path, told, tell):
    monkeypatch.setenv("TIERFS_SHM_DIR", str(tmp_path))
    writer = TierWriter(
        f"{url}/run", ack="staged", codecs="all", ram="64MiB", nvme="0", state_dir=str(tmp_path / "other")
    )
    torch.manual_seed(0)
    weight, moment = torch.randn(1024, 1024), torch.randn(1024, 1024)
    for step in (1, 2):
        saved = {"weight": weight, "moment": moment, "working": weight.bfloat16(), "zeros": torch.zeros(1 << 20)}
        dcp.save(saved, storage_writer=writer, checkpoint_id=f"{url}/run/{step}", no_dist=True)
        writer.wait("object")
        weight, moment = weight + 1e-6 * torch.randn(1024, 1024), torch.randn(1024, 1024)
    found = {}
    for step in (1, 2):
        tensors = told("checkpoint", "show", f"{url}/run/{step}", "--codecs")["tensors"]
        found[step] = {item["name"]: (item["codecs"], item["reasons"]) for item in tensors}
    assert found[1] == {
        "moment": ({"plane": 4}, {"no base": 4}),
        "weight": ({"plane": 4}, {"no base": 4}),
        "working": ({"derive": 2}, {"derived": 2}),
        "zeros": ({"const": 4}, {"no base": 4}),
    }
    assert found[2] == {
        "moment": ({"plane": 4}, {"delta too large": 4}),
        "weight": ({"dplane": 4}, {"delta": 4}),
        "working": ({"derive": 2}, {"derived": 2}),
        "zeros": ({"const": 4}, {"no base": 4}),  # the same chunk in both steps
    }
    sizes = {item["name"]: item["stored"] for item in tensors}
    assert sizes["working"] == 2 * 24, "of each block that nothing but what it is derived from is needed"
    assert sizes["weight"] < 0.85 * sizes["moment"] < 0.85 * (4 << 20)
    text = tell("checkpoint", "show", f"{url}/run/2", "--codecs")
    assert "dplane  delta            weight" in text


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_passes_or_names_the_damaged_tensors(step_10, store, told, tell):
    report = told("checkpoint", "verify", step_10)
    assert (report["damage"], report["tensors"], report["objects"], report["files"]) == ([], 3, 1, 1)
    assert tell("checkpoint", "verify", step_10).endswith(f"of {step_10}: all sound\n")
    (file,) = [item["name"] for item in told("checkpoint", "show", step_10)["files"]]
    (tensor,) = told("checkpoint", "show", step_10, "model.w", "--shards")["tensors"]
    at, row = 0, None
    for row in stat(store, f"run/step_10/{file}").manifest.rows:
        at += row.raw_length
        if at > tensor["shards"][0]["at"]:
            break
    flip_bit(store.objects, chunk_key(row.name), 8 * (row.stored_length - 50))
    (damage,) = told("checkpoint", "verify", step_10, code=6)["damage"]
    assert "model.w" in damage["names"]
    assert (damage["file"], damage["tier"], damage["kind"]) == (file, "object", "corruption")
    text = tell("checkpoint", "verify", step_10, code=6)
    assert text.startswith("damaged  ")
    assert f"  file     {file}, bytes " in text
    assert text.endswith(": 1 damaged\n")
    delete(store, f"run/step_10/{file}")
    assert "missing" in tell("checkpoint", "verify", step_10, code=6)


def test_verify_shows_progress(step_10, capsys):
    assert main(["checkpoint", "verify", step_10, "--progress"]) == 0
    assert "100%" in capsys.readouterr().err


@pytest.mark.parametrize("format_", list(SerializationFormat))
def test_a_plain_directory_is_verified_shown_and_compared(tmp_path, step_10, format_, told, tell):
    writer = dcp.FileSystemWriter(tmp_path / "plain", serialization_format=format_)
    value = {"w": torch.ones(30, 7), "b": torch.zeros(3).bfloat16()}
    dcp.save(value, storage_writer=writer, no_dist=True)
    plain = str(tmp_path / "plain")
    report = told("checkpoint", "verify", plain)
    assert (report["damage"], report["tensors"]) == ([], 2)
    assert report["undigested"] == [os.path.basename(name) for name in os.listdir(plain) if name != ".metadata"]
    assert "without digests" in tell("checkpoint", "verify", plain)
    assert [item["name"] for item in told("checkpoint", "show", plain)["tensors"]] == ["b", "w"]
    made = step_10.replace("step_10", "plain")
    tell("checkpoint", "import", plain, made)
    assert told("checkpoint", "diff", plain, made)["equal"]


def test_ranks_that_saved_on_their_own_are_verified_together_and_shown_one_by_one(url, store, step_10, told):
    metadata = load(store, "run/step_10/.metadata")
    delete(store, "run/step_10/.metadata")
    for rank in (0, 1):
        save(store, f"run/step_10/__{rank}.metadata", metadata)
    assert told("checkpoint", "ls", url)["checkpoints"][0]["state"] == "complete"
    assert told("checkpoint", "verify", step_10)["tensors"] == 6
    assert told("checkpoint", "verify", step_10, "--rank", "1")["tensors"] == 3
    assert "--rank: 0, 1" in told("checkpoint", "show", step_10, code=2)["error"]["message"]
    assert told("checkpoint", "show", step_10, "--rank", "1")["rank"] == 1


# -- diff --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_same_training_in_two_runs_is_the_same(url, told, tell):
    for run, value in (("one", 1.0), ("two", 1.0), ("three", 3.0)):
        with Manager(f"{url}/{run}", save=()) as manager:
            manager.save(1, {"w": torch.full((4,), value)}).wait()
    save_state(f"{url}/plain", {"w": torch.ones(4)})
    found = told("checkpoint", "diff", f"{url}/one/latest", f"{url}/two/latest")
    assert (found["equal"], found["about"], found["objects"]) == (True, True, [])
    found = told("checkpoint", "diff", f"{url}/one/latest", f"{url}/plain", code=1)
    assert (found["about"], found["only_a"], found["objects"]) == (True, ["rank_0.tierfs.rng"], [])
    lines = tell("checkpoint", "diff", f"{url}/one/latest", f"{url}/two/latest").splitlines()
    assert lines[0].startswith("not counted: tierfs.about")
    assert ", 0 different: " in lines[1]
    assert not told("checkpoint", "diff", f"{url}/one/latest", f"{url}/one/latest")["about"]
    assert not told("checkpoint", "diff", f"{url}/one/latest", f"{url}/three/latest", code=1)["equal"]


def test_diff_says_what_differs_and_by_how_much(url, step_10, told, tell):
    save_state(f"{url}/same", state())
    found = told("checkpoint", "diff", step_10, f"{url}/same")
    assert (found["equal"], found["equal_count"]) == (True, 4)
    other = state()
    other["model"]["w"][3, 4:7] += 2
    other["model"]["b"] = other["model"]["b"].float()
    other["step"], other["new"] = 4, torch.ones(1)
    del other["groups"]
    save_state(f"{url}/other", other)
    found = told("checkpoint", "diff", step_10, f"{url}/other", code=1)
    assert (found["equal"], found["only_a"], found["only_b"]) == (False, ["groups.0.lr"], ["new"])
    assert found["unlike"] == [{"name": "model.b", "a": "bfloat16 [5]", "b": "float32 [5]"}]
    assert found["objects"] == ["step"]
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["differing"], tensor["elements"]) == ("model.w", 3, 30_000)
    assert tensor["fraction"] == 1e-4
    assert tensor["max_abs"] == pytest.approx(2, abs=1e-6)
    lines = tell("checkpoint", "diff", step_10, f"{url}/other", code=1).splitlines()
    assert lines[:3] == [
        "only in A  groups.0.lr",
        "only in B  new",
        "unlike     model.b: bfloat16 [5] in A, float32 [5] in B",
    ]
    norm = (12 / float(state()["model"]["w"].double().square().sum())) ** 0.5
    assert tensor["relative"] == pytest.approx(norm)
    assert lines[3].split() == ["relative", "max", "abs", "differing", "of", "not", "finite", "name"]
    assert lines[4].split() == ["differs", f"{norm:.3g}", "2", "0.010%", "30000", "-", "model.w"]
    assert lines[5] == "differs    step (object)"
    assert lines[6].startswith("0 equal, 5 different: A is ")


def test_diff_lists_the_tensors_that_are_farthest_apart(url, told, tell):
    state_a = {name: torch.ones(1000) for name in "abcd"} | {"zero": torch.zeros(9), "int": torch.full((10,), 100)}
    state_b = {name: value + (4 - number) * value / 100 for number, (name, value) in enumerate(state_a.items())}
    state_b |= {"zero": torch.ones(9), "int": torch.full((10,), 150), "d": state_a["d"]}
    save_state(f"{url}/a", state_a)
    save_state(f"{url}/b", state_b)
    found = told("checkpoint", "diff", f"{url}/a", f"{url}/b", code=1)
    relative = {each["name"]: each["relative"] for each in found["tensors"]}
    assert relative == {
        "zero": None,
        "int": 0.5,
        **dict(zip("abc", map(pytest.approx, (0.04, 0.03, 0.02)), strict=True)),
    }
    lines = tell("checkpoint", "diff", f"{url}/a", f"{url}/b", "--top", "3", code=1).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("differs")] == ["zero", "int", "a"]
    assert "and 2 more tensors" in lines[-2]
    assert told("checkpoint", "diff", f"{url}/a", f"{url}/b", "--top", "-1", code=2)


# -- latest and best ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run_url(url, store):
    """A run of three complete checkpoints with a loss and an accuracy, and a newer save without metadata."""
    for step, loss, accuracy in ((9, 0.5, 0.1), (10, 0.3, 0.2), (11, 0.4, 0.3)):
        save_state(f"{url}/run/step_{step}", state(step))
        save(store, f"run/step_{step}/.metrics", json.dumps({"loss": loss, "accuracy": accuracy}).encode())
    save(store, "run/step_12/__0_0.distcp", b"x")
    return f"{url}/run"


@pytest.mark.parametrize(
    ("name", "step"), [("latest", 11), ("best:loss", 10), ("best:loss:max", 9), ("best:accuracy:max", 11)]
)
def test_latest_and_best_name_a_checkpoint_everywhere(run_url, tmp_path, told, name, step):
    named, directory = f"{run_url}/{name}", f"{run_url}/step_{step}"
    for words in (["show"], ["verify"]):
        assert told("checkpoint", *words, named)["url"] == directory
    assert told("checkpoint", "diff", named, directory)["equal"]
    assert told("checkpoint", "export", named, tmp_path / "out.bin")["format"] == "torch"
    assert told("ls", named)["url"] == told("verify", named)["url"] == told("stat", named)["url"] == directory
    assert told("cp", "-r", named, f"{run_url}/kept/")["files"] == 3
    assert told("ls", f"{run_url}/kept")["entries"][0]["name"] == f"step_{step}"
    told("rm", "-r", named)
    assert told("ls", directory, code=3)


def test_a_directory_of_that_name_wins_and_a_target_is_a_new_name(run_url, told):
    told("mv", f"{run_url}/step_9", f"{run_url}/best")
    assert told("checkpoint", "show", f"{run_url}/best")["url"] == f"{run_url}/best"
    told("cp", "-r", f"{run_url}/step_10", f"{run_url}/latest")
    assert told("checkpoint", "show", f"{run_url}/latest")["url"] == f"{run_url}/latest"


def test_a_name_that_means_no_checkpoint_says_why(run_url, url, store, told, tmp_path):
    def problem(name, code):
        return told("checkpoint", "show", name, code=code)["error"]["message"]

    assert "several metrics (accuracy, loss)" in problem(f"{run_url}/best", 2)
    assert "the metric 'los'" in problem(f"{run_url}/best:los", 3)
    assert "no complete checkpoint" in problem(f"{url}/latest", 3)
    assert "latests does not exist" in told("stat", f"{run_url}/latests", code=3)["error"]["message"]
    for step in (9, 10, 11):
        save(store, f"run/step_{step}/.metrics", b'{"loss": %d}' % step)
    assert told("checkpoint", "show", f"{run_url}/best")["step"] == 9


def test_latest_follows_the_line_of_a_run_that_went_back(url, told):
    def train(steps, restore=None):
        with Manager(f"{url}/line", save=[Every(steps=1)]) as manager:
            if restore is not None:
                manager.restore({"w": torch.zeros(4)}, step=restore)
            for step in steps:
                manager.save(step, {"w": torch.full((4,), float(step))})
            manager.wait()

    train([1, 2, 3])
    train([2], restore=1)
    assert told("checkpoint", "show", f"{url}/line/latest")["step"] == 2


def test_prune_pins_the_best(run_url, told):
    shown = told("prune", run_url, "--keep", "latest:1", "--pin", "best:loss:max", "--dry-run")["checkpoints"]
    assert {each["step"]: each["kept"] for each in shown} == {9: True, 10: False, 11: True, 12: True}


def test_verify_of_a_run_reads_all_its_checkpoints(run_url, store, told, tell):
    shown = told("checkpoint", "verify", run_url)
    assert [each["url"] for each in shown["checkpoints"]] == [f"{run_url}/step_{step}" for step in (9, 10, 11)]
    assert shown["tensors"] == 9
    (path,) = (entry.path for entry in find(store, "run/step_10") if entry.path.endswith(".safetensors"))
    row = max(stat(store, path).manifest.rows, key=lambda row: row.raw_length)
    flip_bit(store.objects, chunk_key(row.name), 8 * (row.stored_length - 50))
    lines = tell("checkpoint", "verify", run_url, code=6).splitlines()
    assert [line.endswith("all sound") for line in lines if line.startswith("checked")] == [True, False, True]


def test_show_without_a_match_fails(step_10, told):
    error = told("checkpoint", "show", step_10, "*.wieght", code=3)["error"]
    assert "no tensor of" in error["message"]
    assert "model.w" in error["message"]


# -- export and import -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["dcp", "torch", "safetensors"])
def test_an_export_can_be_imported(url, step_10, tmp_path, format_, told):
    target = str(tmp_path / "new" / "out")
    words = ["--skip-objects"] if format_ == "safetensors" else []
    done = told("checkpoint", "export", step_10, target, "--format", format_, *words)
    assert (done["format"], done["target"], done["tensors"]) == (format_, target, 3)
    assert os.listdir(tmp_path / "new") == ["out"]
    done = told("checkpoint", "import", target, f"{url}/back")
    assert (done["url"], done["tensors"]) == (f"{url}/back", 3)
    found = told("checkpoint", "diff", step_10, f"{url}/back", code=1 if words else 0)
    assert found["only_a"] == (["step"] if words else [])
    assert found["equal_count"] == (3 if words else 4)


def test_the_format_follows_from_the_targets_name(step_10, tmp_path, told, tell):
    assert (
        told("checkpoint", "export", step_10, f"{tmp_path}/a.safetensors", "--skip-objects")["format"] == "safetensors"
    )
    assert torch.equal(load_file(f"{tmp_path}/a.safetensors")["model.w"], state()["model"]["w"])
    assert told("checkpoint", "export", step_10, f"{tmp_path}/a.pt")["format"] == "torch"
    assert torch.load(f"{tmp_path}/a.pt", weights_only=True)["step"] == 3
    assert told("checkpoint", "export", step_10, f"{tmp_path}/a")["format"] == "dcp"
    assert "exported 3 tensors and 1 object," in tell("checkpoint", "export", step_10, f"{tmp_path}/b.pth")


def test_a_store_takes_and_gives_files(url, step_10, told):
    told("checkpoint", "export", step_10, f"{url}/out/model.pt")
    told("checkpoint", "export", step_10, f"{url}/out/model.safetensors", "--skip-objects")
    told("checkpoint", "import", f"{url}/out/model.pt", f"{url}/back")
    assert told("checkpoint", "diff", step_10, f"{url}/back")["equal"]
    told("checkpoint", "import", f"{url}/out/model.safetensors", f"{url}/tensors")
    assert told("checkpoint", "diff", step_10, f"{url}/tensors", code=1)["only_a"] == ["step"]
    dcp.save(state(), checkpoint_id=f"{url}/stock", no_dist=True)
    told("checkpoint", "import", f"{url}/stock", f"{url}/made")
    assert told("checkpoint", "show", f"{url}/made")["format"] == "tierfs"
    assert told("checkpoint", "diff", f"{url}/made", step_10)["equal"]
    assert told("checkpoint", "export", step_10, f"{url}/out/dcp", code=2)["error"]["kind"] == "invalid-input"
    assert told("checkpoint", "export", step_10, f"{url}/out/model.pt", code=4)["error"]["kind"] == "already-exists"


def test_a_checkpoint_on_another_filesystem_is_imported(url, step_10, tmp_path, told):
    elsewhere = f"memory://elsewhere-{uuid.uuid4().hex}"
    dcp.save(state(), storage_writer=FsspecWriter(f"{elsewhere}/dcp"), no_dist=True)
    told("checkpoint", "export", step_10, f"{tmp_path}/model.pt")
    fsspec.filesystem("memory").put(f"{tmp_path}/model.pt", f"{elsewhere}/model.pt")
    for name in ("dcp", "model.pt"):
        told("checkpoint", "import", f"{elsewhere}/{name}", f"{url}/{name}")
        assert told("checkpoint", "diff", step_10, f"{url}/{name}")["equal"]
    assert told("checkpoint", "diff", step_10, f"{elsewhere}/dcp")["equal"]
    assert told("checkpoint", "verify", f"{elsewhere}/dcp")["damage"] == []
    assert told("checkpoint", "import", f"{elsewhere}/nothing", f"{url}/x", code=3)["error"]["kind"] == "not-found"


def test_an_existing_target_is_replaced_only_with_force(url, step_10, tmp_path, told, tell):
    for name, words in (("a.pt", []), ("a", []), ("a.safetensors", ["--skip-objects"])):
        target = f"{tmp_path}/{name}"
        told("checkpoint", "export", step_10, target, *words)
        assert "--force" in told("checkpoint", "export", step_10, target, *words, code=4)["error"]["message"]
        told("checkpoint", "export", step_10, target, *words, "--force")
        tell("checkpoint", "import", target, f"{url}/back", "--force")
    assert "--force" in told("checkpoint", "import", f"{tmp_path}/a", f"{url}/back", code=4)["error"]["message"]
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(("a", "."))) == [
        "a",
        "a.pt",
        "a.safetensors",
    ]


def test_a_directory_that_is_no_checkpoint_is_never_replaced(step_10, tmp_path, told):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    error = told("checkpoint", "export", step_10, f"{tmp_path}/mine", "--force", code=4)["error"]
    assert "thesis.tex" in error["message"]
    assert (
        "a directory"
        in told("checkpoint", "export", step_10, f"{tmp_path}/mine", "--force", "--format", "torch", code=4)["error"][
            "message"
        ]
    )
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


@pytest.mark.parametrize("format_", ["dcp", "torch", "safetensors"])
@pytest.mark.parametrize("there", [False, True])
def test_an_export_that_fails_leaves_what_was_there(step_10, store, tmp_path, format_, there, told):
    target = tmp_path / "out"
    words = [step_10, str(target), "--format", format_, "--skip-objects"]
    if there:
        told("checkpoint", "export", *words)
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("out*") if path.is_file()}
    (file,) = [item["name"] for item in told("checkpoint", "show", step_10)["files"]]
    delete(store, f"run/step_10/{file}")
    assert told("checkpoint", "export", *words, "--force", code=6)["error"]["kind"] == "corruption"
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("out*") if path.is_file()} == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert target.exists() == there


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux")
@pytest.mark.parametrize("format_", ["torch", "safetensors"])
def test_a_full_disk_is_exit_code_9(step_10, format_, told):
    words = ["export", step_10, "/dev/full", "--format", format_, "--skip-objects", "--force"]
    error = told("checkpoint", *words, code=9)["error"]
    assert (error["kind"], error["path"]) == ("capacity", "/dev/full")


def test_a_full_disk_is_named_by_the_directory_that_was_to_be_made(step_10, tmp_path, monkeypatch, told):
    def write(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tierfs.cli.commands._checkpoint_exchange.write_dcp", write)
    error = told("checkpoint", "export", step_10, f"{tmp_path}/out", "--skip-objects", code=9)["error"]
    assert (error["kind"], error["path"]) == ("capacity", f"{tmp_path}/out")


def test_an_interrupted_export_leaves_nothing(step_10, tmp_path, monkeypatch):
    def interrupt(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tierfs.cli.terminal.progress.Progress.advance", interrupt)
    before = sorted(os.listdir(tmp_path))
    for name in ("a", "a.pt", "a.safetensors"):
        assert main(["checkpoint", "export", step_10, f"{tmp_path}/{name}", "--skip-objects"]) == 130
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("failing", [1, 2])
def test_a_directory_stays_where_its_replacement_fails(step_10, tmp_path, monkeypatch, failing, told):
    words = ["export", step_10, f"{tmp_path}/out", "--skip-objects"]
    told("checkpoint", *words)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    rename, calls = os.rename, itertools.count(1)

    def refuse(source, target):
        if str(source).startswith(str(tmp_path)) and next(calls) == failing:
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    names = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(os, "rename", refuse)
    told("checkpoint", *words, "--force", code=1)
    assert sorted(os.listdir(tmp_path)) == names
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_no_checkpoint_is_put_below_a_file(step_10, store, url, tmp_path, force, told):
    save(store, "file", b"file")
    told("checkpoint", "export", step_10, f"{tmp_path}/x.pt", "--skip-objects")
    for words in (
        ["export", step_10, f"{url}/file/x.pt", "--skip-objects"],
        ["export", step_10, f"{url}/file/x.safetensors", "--skip-objects"],
        ["import", f"{tmp_path}/x.pt", f"{url}/file"],
        ["import", f"{tmp_path}/x.pt", f"{url}/file/x"],
    ):
        assert "/file is a file" in told("checkpoint", *words, *force, code=4)["error"]["message"]
    assert [entry.path for entry in find(store, "file")] == ["file"]


def test_an_invalid_import_is_an_error(url, tmp_path, told):
    (tmp_path / "file").write_bytes(b"nonsense")
    assert told("checkpoint", "import", f"{tmp_path}/file", f"{url}/x", code=2)["error"]["kind"] == "invalid-input"
    assert told("checkpoint", "import", f"{tmp_path}/nothing", f"{url}/x", code=3)["error"]["kind"] == "not-found"
    assert (
        told("checkpoint", "import", f"{tmp_path}/file", f"{tmp_path}/no-store/x", code=3)["error"]["kind"]
        == "store-not-found"
    )
    assert told("checkpoint", "ls", url)["checkpoints"] == []


# -- usage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ls"], "--help` shows examples"),
        (["dance", "x"], "--help` shows examples"),
        (["ls", "x", "y"], "unrecognized arguments: y"),
        (["diff", "x"], "OTHER"),
        (["show", ""], "empty"),
        (["show", "x", "--usage"], "unrecognized arguments: --usage"),
        (["ls", "x", "--limit", "-3"], "at least 0"),
    ],
)
def test_wrong_usage_says_what_is_wrong(words, text, told):
    assert text in told("checkpoint", *words, code=2)["error"]["message"]


def test_without_torch_the_error_says_how_to_get_it(url, step_10, monkeypatch, told):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'tierfs[torch]'" in told("checkpoint", "show", step_10, code=2)["error"]["message"]


LISTS = {
    "checkpoint ls": ("main(['checkpoint', 'ls', url])", 0),
    "prune": ("main(['prune', url, '--keep', 'latest:1', '--dry-run'])", 1),  # the file with the run's lines
}


@pytest.mark.parametrize(("call", "more"), LISTS.values(), ids=LISTS)
def test_a_list_costs_a_request_a_checkpoint_and_no_torch(url, call, more):
    for step in range(3):
        save_state(f"{url}/run/step_{step}", state())
    code = f"""
import sys
from tierfs.cli import main
from tierfs.session import open_store, parse_url
url = "{url}/run"
store, _ = open_store(parse_url(url))
before = store.objects.snapshot()
assert {call} == 0
sent = {{name: int(each["requests"] - before[name]["requests"]) for name, each in store.objects.snapshot().items()}}
assert "torch" not in sys.modules
print(sent["read"], sent["head"], sum(sent.values()) - sent["list"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{3 + more} 0 {3 + more}"


def test_commit_publishes_what_is_complete_and_names_what_is_not(url, store, capsys):
    # A save of two hosts. The second one has not published its part.
    save(store, "run/rank-0", b"part")
    document = json.dumps({"files": {"rank-0": {"length": 4}, "rank-1": {"length": 4}}}).encode()
    Commits(store).announce("run", document, SaveMark(7, "ab" * 16))
    assert main(["checkpoint", "commit", f"{url}/run"]) == 11
    assert "waits for 1 of 2 files: rank-1" in capsys.readouterr().err
    save(store, "run/rank-1", b"part")
    assert main(["checkpoint", "commit", f"{url}/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": f"{url}/run", "save_id": "ab" * 16}
    assert load(store, "run/.metadata") == document
    assert main(["checkpoint", "commit", f"{url}/run"]) == 0
    assert f"is complete: save {'ab' * 16}" in capsys.readouterr().out
    assert main(["checkpoint", "commit", f"{url}/nothing"]) == 3
    assert "no save to it is announced" in capsys.readouterr().err
    assert main(["checkpoint", "commit", f"{url}/run", "--timeout", "nan"]) == 2
    assert main(["checkpoint", "ls", f"{url}/run", "--timeout", "1"]) == 2
