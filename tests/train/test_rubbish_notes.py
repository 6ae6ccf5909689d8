"""Notes and lines of a run that hold anything at all: advice is passed over, and what cannot be used is one error."""

import json

import pytest
import torch
from support.rubbish import TEXTS, altered, outcomes

import tierfs
from tierfs.checkpoint.notes import LINES, NOTES
from tierfs.cli.app import main
from tierfs.errors import FormatError
from tierfs.session import open_store, parse_url
from tierfs.store import save
from tierfs.train import Every, Latest, Manager
from tierfs.train.run import About

OPTIONS = {"ram": "0", "nvme": "0"}
MEMBERS = {".record": {"save_id": "", "digests": {}, "ranks": 1}, ".damaged": {"save_id": "", "why": ""}}


def state(number):
    return {"model": torch.full((30,), float(number))}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The URL of a run with the steps 5 and 10, whose files each test replaces."""
    url = f"file://{tmp_path_factory.mktemp('run')}/store"
    tierfs.init(url)
    with manager(f"tierfs::{url}/run") as trained:
        for step in range(1, 11):
            trained.step(step, state(step), metrics={"loss": 1.0})
    return f"tierfs::{url}/run"


def manager(url):
    return Manager(url, save=[Every(steps=5)], keep=[Latest(5)], on_stale="ignore", **OPTIONS)


def put(run, name, text):
    store, path = open_store(parse_url(run))
    save(store, f"{path}/{name}", text)


def look(run, capsys):
    """Do all that reads notes. Return the step that is restored, and the exit codes of the commands."""
    codes = [main(["checkpoint", "ls", run]), main(["checkpoint", "show", f"{run}/step_10"])]
    codes.append(main(["prune", run, "--keep", "latest:1", "--keep", "best:1:loss", "--dry-run"]))
    capsys.readouterr()
    with manager(run) as found:
        found.latest()
        return found.restore(state(0)).step, codes


@pytest.mark.parametrize("note", NOTES)
def test_a_note_of_rubbish_is_passed_over(run, note, capsys, monkeypatch):
    monkeypatch.setenv("TIERFS_RAM", "0")
    monkeypatch.setenv("TIERFS_NVME", "0")
    for name, text in altered(MEMBERS[note]) if note in MEMBERS else TEXTS.items():
        put(run, f"step_10/{note}", text)
        assert look(run, capsys) == (10, [0, 0, 0]), name
    store, path = open_store(parse_url(run))
    tierfs.store.delete(store, f"{path}/step_10/{note}")


def test_lines_of_rubbish_are_one_error(run, capsys, monkeypatch):
    monkeypatch.setenv("TIERFS_RAM", "0")
    monkeypatch.setenv("TIERFS_NVME", "0")
    document = {"current": "b", "begins": {"a": ["", 5], "b": ["a", 5]}}

    def read(text):
        put(run, LINES, text)
        look(run, capsys)

    for name, reason in outcomes(read, document):
        # Some of these texts are lines, and a few of those leave every step behind.
        assert not reason or "lines is invalid: remove it" in reason or "left it behind" in reason, name
    store, path = open_store(parse_url(run))
    tierfs.store.delete(store, f"{path}/{LINES}")


def test_a_description_of_rubbish_is_one_error():
    document = json.loads(About(5, run="a", state={"epoch": 1}).encode())
    assert list(outcomes(lambda text: About.decode(text.decode(errors="replace"), "a"), document, FormatError))
