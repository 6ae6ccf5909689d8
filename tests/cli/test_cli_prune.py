"""``tierfs prune`` on checkpoints that `TierWriter` saved."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp

import tierfs
from tierfs.checkpoint import prune as pruning
from tierfs.cli.app import main
from tierfs.dcp import TierReader, TierWriter
from tierfs.session import open_store, parse_url
from tierfs.store import find, save, usage
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.train import Manager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_RAM", "0")
    monkeypatch.setenv("TIERFS_NVME", "0")
    tierfs.init(str(tmp_path / "store"), lease_s=1, grace_s=2)
    url = f"tierfs::file://{tmp_path}/store/run"
    for step in (100, 200, 300, 400):
        save_step(url, step)
    return url


def save_step(url, step):
    state = {"w": torch.full((50_000,), float(step)), "step": step}
    dcp.save(state, storage_writer=TierWriter(f"{url}/step_{step}"), no_dist=True)


def prune(capsys, *words):
    capsys.readouterr()
    code = main(["prune", *words, "--json"])
    return code, {each["step"]: each for each in json.loads(capsys.readouterr().out)["checkpoints"]}


def test_prune_removes_what_no_rule_keeps(run, capsys):
    store = open_store(parse_url(run))[0]
    save(store, "run/step_100/.pinned", b"")
    save(store, "run/step_200/.metrics", b'{"loss": 0.5}')
    save(store, "run/step_300/.metrics", b'{"loss": 0.7}')
    rules = ("--keep", "latest:1", "--keep", "best:1:loss")
    code, shown = prune(capsys, run, *rules, "--dry-run")
    assert (code, [step for step, each in shown.items() if not each["kept"]]) == (0, [300])
    assert len(find(store, "run")) > 8
    code, shown = prune(capsys, run, *rules)
    assert (code, shown[300]["removed"], shown[100]["reasons"]) == (0, True, ["pinned"])
    assert not any("step_300" in entry.path for entry in find(store, "run"))
    state = {"w": torch.zeros(50_000), "step": 0}
    dcp.load(state, storage_reader=TierReader(f"{run}/step_200"), no_dist=True)
    assert state["w"][0] == 200.0


def test_ls_and_prune_know_full_and_light_checkpoints(run, capsys):
    with Manager(run, save=(), on_stale="ignore") as manager:
        for step, kind in ((500, "full"), (600, "light"), (700, "light")):
            manager.save(step, {"model": torch.ones(9)}, kind=kind).wait()
    assert main(["checkpoint", "ls", run, "--json"]) == 0
    kinds = {each["step"]: each["kind"] for each in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert kinds == {100: None, 200: None, 300: None, 400: None, 500: "full", 600: "light", 700: "light"}
    code, shown = prune(capsys, run, "--keep", "latest:1")
    assert (code, [step for step, each in shown.items() if each["kept"]]) == (0, [500, 700])
    assert (shown[500]["kind"], shown[700]["kind"]) == ("full", "light")


def test_prune_removes_steps_that_a_run_left_behind_first(run, capsys):
    root = f"{run}/other"
    for begin, steps in ((None, (1, 2, 3)), (1, (4,))):
        with Manager(root, save=(), on_stale="ignore") as manager:
            if begin is not None:
                manager.restore({"model": torch.ones(9)}, step=begin)
            for step in steps:
                manager.save(step, {"model": torch.ones(9)}).wait()
    code, shown = prune(capsys, root, "--keep", "latest:3")
    assert (code, [step for step, each in shown.items() if each["kept"]]) == (0, [1, 4])


def test_a_checkpoint_that_is_saved_anew_meanwhile_stays(run, capsys, monkeypatch):
    decide = pruning.decide

    def decide_late(*arguments):
        save_step(run, 100)
        return decide(*arguments)

    monkeypatch.setattr(pruning, "decide", decide_late)
    code, shown = prune(capsys, run, "--keep", "latest:1")
    assert (code, shown[100]["removed"], shown[200]["removed"]) == (5, False, True)


def test_a_pickle_of_torchs_own_writers_needs_torch(tmp_path):
    url = f"tierfs::file://{tmp_path}/store/run"
    tierfs.init(f"file://{tmp_path}/store")
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=f"{url}/step_1", no_dist=True)
    code = f"""
import sys
from tierfs.cli import main
sys.modules["torch"] = None
assert main(["checkpoint", "ls", "{url}"]) == main(["prune", "{url}", "--keep", "latest:1"]) != 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("pip install 'tierfs[torch]'") == 2


@pytest.mark.parametrize("metrics", [b'{"loss": 0.5}', None])
def test_a_metric_that_no_checkpoint_has_is_refused(run, capsys, metrics):
    store = open_store(parse_url(run))[0]
    if metrics:
        save(store, "run/step_200/.metrics", metrics)
    assert main(["prune", run, "--keep", "latest:1", "--keep", "best:2:los"]) == 3
    shown = capsys.readouterr().err
    assert "has the metric 'los': nothing was removed" in shown
    assert f"their metrics are: {'loss' if metrics else 'none'}" in shown
    assert len([entry for entry in find(store, "run") if entry.path.endswith(".metadata")]) == 4


def test_a_pin_that_names_no_checkpoint_is_refused(run, capsys):
    assert main(["prune", run, "--keep", "latest:1", "--pin", "step_20"]) == 3
    shown = capsys.readouterr().err
    assert "run/step_20 is to be pinned, but holds no checkpoint" in shown
    assert "run/step_200" in shown
    store = open_store(parse_url(run))[0]
    assert sum(entry.path.endswith("/.metadata") for entry in find(store, "run", detail=False)) == 4


@pytest.mark.parametrize(
    "form", ["step_100", "step_100/", "/step_100", "{url}/step_100", "{url}/step_100/", "{path}/step_100"]
)
def test_a_pin_is_a_name_a_path_or_a_url(run, capsys, form):
    pin = form.format(url=run, path=run.removeprefix("tierfs::file://"))
    code, shown = prune(capsys, run, "--keep", "latest:1", "--pin", pin)
    assert (code, [step for step, each in shown.items() if each["kept"]]) == (0, [100, 400])


def test_gc_frees_to_the_byte_what_usage_said(run, capsys):
    store = open_store(parse_url(run))[0]

    def stored():
        prefixes = (".tierfs/chunks/", ".tierfs/tree/", ".tierfs/references/")
        return sum(item.size for prefix in prefixes for item in store.objects.list(prefix))

    said, before = usage(store, "run/step_100").freed_bytes, stored()
    assert prune(capsys, run, "--keep", "latest:3")[0] == 0
    store.clock.sleep(3.2)
    collect(store, GcOptions(exclusive=True))
    store.clock.sleep(4.2)
    collect(store, GcOptions(exclusive=True))
    assert before - stored() == said
    assert main(["checkpoint", "verify", f"{run}/step_400"]) == 0
