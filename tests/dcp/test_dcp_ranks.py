"""Stock DCP by URL with a process group: one rank and two, FSDP2, threads and processes, resharding."""

from __future__ import annotations

import json
import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import dcp_ranks
from support.torch_ranks import run_world
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

import tierfs

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A store, a configured store that does not exist yet, and an ``os.sync`` that raises."""
    directory = tmp_path_factory.mktemp("ranks")
    tierfs.init(f"file://{directory}/store")
    config = directory / "config.toml"
    config.write_text(f'[stores.{dcp_ranks.STORE_NAME}]\nurl = "file://{directory}/named"\ncreate = true\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERFS_CONFIG", str(config))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setattr(os, "sync", dcp_ranks.refuse_sync)
        yield dcp_ranks.Lab(directory, f"tierfs::file://{directory}/store", f"tierfs://{dcp_ranks.STORE_NAME}")


@pytest.fixture(scope="module")
def mesh(lab):
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{lab.directory}/alone", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dcp_ranks.stop_checkpoint_process()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def from_one(lab, mesh):
    """The fingerprint of a state that one rank saved."""
    trainer = dcp_ranks.Trainer(mesh, seed=1)
    dcp.save(trainer.state(), checkpoint_id=f"{lab.root}/from_one")
    expected = trainer.fingerprint()
    (lab.directory / "from_one.json").write_text(json.dumps(expected))
    return expected


@pytest.fixture(scope="module")
def outcomes(lab, from_one):
    """The outcomes of two ranks, which start after one rank has saved."""
    run_world(dcp_ranks.run_rank, dcp_ranks.WORLD, lab)
    return dcp_ranks.read_outcomes(lab)


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in dcp_ranks.SCENARIOS])
def test_with_two_ranks(outcomes, scenario):
    for number, outcome in enumerate(outcomes):
        assert scenario in outcome, f"rank {number} did not come to it: an earlier scenario failed"
        assert not outcome[scenario], f"rank {number}: {outcome[scenario]}"


def test_a_checkpoint_of_two_ranks_loads_on_one(lab, mesh, outcomes):
    expected = json.loads((lab.directory / "from_two.json").read_text())
    trainer = dcp_ranks.Trainer(mesh, seed=2)
    assert trainer.fingerprint() != expected
    trainer.load(f"{lab.root}/from_two")
    assert trainer.fingerprint() == expected


def test_one_rank_gets_back_what_it_saved(lab, mesh, from_one):
    trainer = dcp_ranks.Trainer(mesh, seed=2)
    assert trainer.fingerprint() != from_one
    trainer.load(f"{lab.root}/from_one")
    assert trainer.fingerprint() == from_one


@pytest.mark.outlived  # DCP keeps the process that saves
@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_one_rank_saves_in_the_background(lab, mesh, kind):
    url = f"{lab.root}/background-{kind.value}"
    note = lab.directory / f"background-{kind.value}"
    trainer = dcp_ranks.Trainer(mesh, seed=1)
    expected = trainer.fingerprint()
    future = dcp.async_save(
        trainer.state(), checkpoint_id=url, planner=dcp_ranks.GuardedPlanner(note), async_checkpointer_type=kind
    )
    trainer.step()
    future.result()
    assert (int(note.read_text()) == os.getpid()) is (kind is AsyncCheckpointerType.THREAD)
    assert trainer.fingerprint() != expected
    trainer.load(url)
    assert trainer.fingerprint() == expected
