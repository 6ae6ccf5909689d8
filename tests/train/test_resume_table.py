"""The documented table of what a restore brings back: each cell is equal, noted or refused, none differs in silence."""

import json
import re
from pathlib import Path

import fsspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
from support import resume_ranks
from support.resume_cells import CONTENTS, OPTIONS, STEPS, cell, differences, replayed
from support.torch_ranks import run_world

import tierfs
from tierfs.train import Manager

PAGE = Path(__file__).parents[2] / "docs/reference/training.md"
NOT_RUN = "-"  # torch itself refuses to train so


def table():
    """Return the cells of the documented table, by content and column."""
    section = PAGE.read_text().partition("## What a restore brings back")[2].partition("\n## ")[0]
    rows = [[each.strip() for each in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


TABLE = table()


def test_the_table_has_every_content():
    assert list(TABLE) == list(CONTENTS)
    cells = {each for row in TABLE.values() for each in row.values()}
    assert cells == {"equal", "noted", "refused", NOT_RUN}


@pytest.mark.parametrize("how", ["full", "rollback"])
@pytest.mark.parametrize(("place", "content"), list(enumerate(CONTENTS)), ids=list(CONTENTS))
def test_one_process(place, content, how, root):
    kind = ("state", "dict")[(place + (how == "full")) % 2]  # each pair of content, kind and how occurs
    found, why = cell(content, root, kind=kind, how=how)
    assert found == TABLE[content][how], why


@pytest.mark.parametrize("kind", ["state", "dict"])
@pytest.mark.parametrize("content", CONTENTS)
def test_replay(content, kind, root):
    found, why = replayed(content, root, kind)
    assert found == TABLE[content]["Replay"], why


@pytest.mark.parametrize("how", ["light", "only="])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_part_of_the_state_is_noted(content, how, root):
    found, why = cell(content, root, how=how)
    assert found in {"noted", TABLE[content]["full"]} - {"equal"}, why


class Casting:
    """An object that takes its tensor in another dtype, and says nothing."""

    def __init__(self, size):
        self.tensor = torch.rand(size)

    def state_dict(self):
        return {"tensor": self.tensor.clone()}

    def load_state_dict(self, state):
        self.tensor = state["tensor"].bfloat16().float()


def test_a_restore_compares_what_it_is_asked_to(root, monkeypatch):
    state = {"small": Casting(20), "large": Casting(200)}
    with Manager(root, **OPTIONS) as run:
        run.save(1, state).wait()
        [note] = run.restore(state).notes
        assert note.startswith("2 values are not what was saved")
        # The bound is far beyond what a test can hold.
        monkeypatch.setattr("tierfs.train.restore.COMPARED_BYTES", 30_000)
        state = {"small": Casting(20), "large": Casting(20_000)}
        run.save(2, state).wait()
        found = run.restore(state)
        assert found.not_compared == ("large.tensor",)
        assert found.notes == ("1 values are not what was saved: ['small.tensor of rank 0']",)
        unseen = run.restore(state, verify=False)
    assert unseen.is_exact
    assert set(unseen.not_compared) == {"small.tensor", "large.tensor", "rank_0.tierfs.rng"}


@pytest.mark.parametrize("damage", ["missing", "rubbish", "of another save"])
def test_a_restore_without_a_record_is_not_called_exact(root, damage):
    fs, path = fsspec.url_to_fs(root, ram="0", nvme="0")
    state = {"weight": torch.ones(3)}
    with Manager(root, **OPTIONS) as run:
        run.save(1, state).wait()
        record = f"{path}/step_1/.record"
        if damage == "missing":
            fs.rm_file(record)
        elif damage == "rubbish":
            fs.pipe_file(record, b'{"save_id": "x", "ranks": 7')
        else:
            fs.pipe_file(record, json.dumps({**json.loads(fs.cat_file(record)), "save_id": "0" * 32}).encode())
        [note] = run.restore(state).notes
    assert "nothing shows whether the state is the saved one" in note


@pytest.mark.parametrize("kind", ["state", "dict"])
def test_a_rollback_drops_gradients_that_no_step_used(kind, root):
    made = CONTENTS["parameters of one group"](0)
    made.step(1)
    with Manager(root, **OPTIONS) as run:
        run.save(1, made.state(kind)).wait()
        before = made.told()
        made.backward(2)
        assert run.restore(made.state(kind), step=1).is_exact
    assert not differences(before, made.told())


@pytest.mark.parametrize("runs", ["compiled", "compiled step"])
@pytest.mark.parametrize("content", CONTENTS)
def test_compiled(content, runs, root):
    found, why = cell(content, root, runs=runs)
    assert found == TABLE[content]["`torch.compile`"], why


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The cells that each of two ranks found, and where they saved."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    directory = tmp_path_factory.mktemp("resume-ranks")
    url = f"tierfs::file://{directory}/store"
    tierfs.init(f"file://{directory}/store")
    run_world(resume_ranks.main, resume_ranks.WORLD, directory, url)
    return [json.loads((directory / f"cells-{rank}.json").read_text()) for rank in range(resume_ranks.WORLD)], url


@pytest.mark.parametrize("runs", resume_ranks.RUNS)
@pytest.mark.parametrize("content", CONTENTS)
def test_two_ranks(ranks, content, runs):
    for each in ranks[0]:
        found, why = each[f"{content}/{runs}"]
        assert found.replace("not run", NOT_RUN) == TABLE[content][runs], why


@pytest.mark.parametrize("content", CONTENTS)
def test_one_rank_restores_what_two_saved(ranks, content):
    cells, url = ranks
    made = CONTENTS[content](1)
    if cells[0][f"{content}/DDP"][0] in {"not run", "refused"}:
        return  # there is no such checkpoint
    with Manager(resume_ranks.place(url, content, "DDP"), **OPTIONS) as run:
        restored = run.restore(made.state("state"))
    assert restored.step == STEPS
    assert any(re.search(r"2 ranks saved it, (and|but) 1 restored it", note) for note in restored.notes)
