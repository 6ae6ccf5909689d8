"""Stock DCP uses tierfs' writer, reader and planner for tierfs URLs alone, once these are installed."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import torch_importer
from support.waiting import until
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    _storage_utils,
    format_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

import tierfs
import tierfs.dcp
from tierfs.dcp.address import full_url
from tierfs.errors import InvalidInputError
from tierfs.train import Manager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

ROOT = Path(__file__).parents[2]
STOCK = (_storage_utils._storage_setup, state_dict_loader._load_state_dict, dcp.async_save)


def names_in_torch():
    return (
        _storage_utils._storage_setup,
        state_dict_saver._storage_setup,
        state_dict_loader._storage_setup,
        state_dict_loader._load_state_dict,
        state_dict_saver.async_save,
        dcp.async_save,
    )


@pytest.fixture
def root(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"


@pytest.fixture
def installed():
    tierfs.dcp.install()
    yield
    tierfs.dcp.uninstall()


def state(value=1.0):
    return {"weight": torch.full((30, 20), value), "step": 7}


def is_ours(url):
    return fsspec.open(f"{url}/.metadata").open().read(1) == b"{"


def load(url, **kwargs):
    found = {"weight": torch.zeros(30, 20), "step": 0}
    dcp.load(found, checkpoint_id=url, **kwargs)
    return found


@pytest.mark.usefixtures("installed")
def test_a_save_by_url_is_tierfs_own_and_loads_by_url(root):
    dcp.save(state(), checkpoint_id=f"{root}/step_1")
    assert is_ours(f"{root}/step_1")
    found = load(f"{root}/step_1")
    assert found["step"] == 7
    assert torch.equal(found["weight"], state()["weight"])


def test_without_it_a_save_by_url_is_torchs_own(root):
    dcp.save(state(), checkpoint_id=f"{root}/step_1")
    assert not is_ours(f"{root}/step_1")
    assert names_in_torch() == (STOCK[0], STOCK[0], STOCK[0], STOCK[1], STOCK[2], STOCK[2])


@pytest.mark.usefixtures("installed")
def test_a_checkpoint_of_torch_is_loaded_after_install(root):
    dcp.save(state(3.0), storage_writer=FsspecWriter(f"{root}/stock"))
    assert not is_ours(f"{root}/stock")
    assert torch.equal(load(f"{root}/stock")["weight"], state(3.0)["weight"])


@pytest.mark.usefixtures("installed")
def test_the_writer_stages_an_asynchronous_save(root, monkeypatch):
    monkeypatch.delattr(state_dict_saver, "DefaultStager")
    saved = state(2.0)
    future = dcp.async_save(saved, checkpoint_id=f"{root}/step_2")
    saved["weight"].fill_(-1)
    future.result()
    assert is_ours(f"{root}/step_2")
    assert torch.equal(load(f"{root}/step_2")["weight"], state(2.0)["weight"])


class Trusting(dcp.DefaultLoadPlanner):
    """Unpickles anything, like torch's own planner. A caller that derives a planner asks for that."""


class Foreign:
    """A value that weights_only refuses."""


@pytest.mark.usefixtures("installed")
def test_a_load_by_url_runs_nothing_that_the_checkpoint_brings_along(root):
    dcp.save({"weight": torch.zeros(30, 20), "step": Foreign()}, checkpoint_id=f"{root}/foreign")
    with pytest.raises(dcp.CheckpointException) as raised:
        load(f"{root}/foreign")
    assert isinstance(raised.value.failures[0][0], InvalidInputError)
    # If the caller passes a planner, that planner decides.
    assert isinstance(load(f"{root}/foreign", planner=Trusting())["step"], Foreign)


@pytest.mark.usefixtures("installed")
def test_paths_behind_tierfs_are_those_of_this_host(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(
        [f"tierfs::{tmp_path}/store/a", "tierfs::store/b", Path(f"{root}/c"), Path(f"tierfs::{tmp_path}/store/d")]
    ):
        dcp.save(state(float(number)), checkpoint_id=name)
        assert is_ours(f"{root}/{'abcd'[number]}")
        assert load(name)["weight"][0, 0] == number
    dcp.async_save(state(9.0), checkpoint_id="tierfs::store/e").result()
    assert load(f"{root}/e")["weight"][0, 0] == 9
    assert sorted(os.listdir(tmp_path)) == ["store"]


@pytest.mark.usefixtures("installed")
def test_other_ids_and_what_is_handed_over_are_left_alone(root, tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "plain")
    dcp.save(state(), checkpoint_id=str(tmp_path / "text"))
    dcp.async_save(state(), checkpoint_id=f"file://{tmp_path}/async").result()
    for name in ("plain", "text", "async"):
        assert (tmp_path / name / ".metadata").read_bytes().startswith(b"\x80")
        assert load(str(tmp_path / name))["step"] == 7
    dcp.save(state(), storage_writer=FsspecWriter(f"{root}/x"), checkpoint_id=f"{root}/y")
    assert not is_ours(f"{root}/y")
    found = state(0.0)
    dcp.load(found, storage_reader=FsspecReader(f"{root}/y"))
    assert found["weight"][0, 0] == 1
    with pytest.raises(RuntimeError, match="must be specified"):
        dcp.save(state())


@pytest.mark.parametrize(
    "convert",
    [
        lambda url: format_utils.dcp_to_torch_save(url, "out.pt"),
        lambda url: format_utils.torch_save_to_dcp("in.pt", url),
        lambda url: dcp.save(state(), storage_writer=HuggingFaceStorageWriter(url)),
        lambda url: dcp.load(state(), storage_reader=HuggingFaceStorageReader(url)),
    ],
    ids=["to torch.save", "from torch.save", "to safetensors", "from safetensors"],
)
@pytest.mark.usefixtures("installed")
def test_conversions_for_local_disks_name_export(root, tmp_path, monkeypatch, convert):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    torch.save(state(), "in.pt")
    with pytest.raises(CheckpointException, match="is a tierfs URL") as caught:
        convert(f"{root}/run")
    assert "`tierfs checkpoint export URL TARGET`" in str(caught.value)
    assert os.listdir() == ["in.pt"]


def test_doing_it_twice_is_doing_it_once_and_undoing_it_brings_everything_back():
    module = types.ModuleType("trainer_that_was_imported_before")
    module.save_later = dcp.async_save
    sys.modules[module.__name__] = module
    try:
        before = names_in_torch()
        tierfs.dcp.install()
        first = names_in_torch()
        tierfs.dcp.install()
        assert names_in_torch() == first
        assert module.save_later is dcp.async_save
        assert not set(first) & set(before)
        tierfs.dcp.uninstall()
        assert names_in_torch() == before
        assert module.save_later is STOCK[2]
        tierfs.dcp.uninstall()
        assert names_in_torch() == before
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("module", "name", "instead", "said"),
    [
        (
            _storage_utils,
            "_storage_setup",
            None,
            "no function torch.distributed.checkpoint._storage_utils._storage_setup",
        ),
        (
            _storage_utils,
            "_storage_setup",
            lambda storage: None,
            "takes storage, not storage, checkpoint_id, reader",
        ),
        (
            state_dict_loader,
            "_load_state_dict",
            None,
            "no function torch.distributed.checkpoint.state_dict_loader._load",
        ),
        (
            state_dict_saver,
            "_storage_setup",
            lambda storage, checkpoint_id, reader: None,
            "do not use _storage_utils._storage_setup",
        ),
    ],
)
def test_a_torch_that_is_made_otherwise_is_not_touched(monkeypatch, module, name, instead, said):
    if instead is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, instead)
    with pytest.raises(InvalidInputError, match=f"torch {re.escape(torch.__version__)}: .*{said}.* 2.11 to 2.14; "):
        tierfs.dcp.install()
    assert dcp.async_save is STOCK[2]
    tierfs.dcp.uninstall()
    assert dcp.async_save is STOCK[2]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("tierfs::s3:/bucket/run", "tierfs::s3://bucket/run"),
        ("tierfs::file:/data/run", "tierfs::file:///data/run"),
        ("tierfs:/prod/run", "tierfs://prod/run"),
        ("tierfs::/data/run", "tierfs::file:///data/run"),
        ("tierfs::file:///data/run", "tierfs::file:///data/run"),
        ("tierfs::s3://bucket/run", "tierfs::s3://bucket/run"),
        ("tierfs://prod/run", "tierfs://prod/run"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("/data/run", "/data/run"),
        ("tierfs::", "tierfs::"),
    ],
)
def test_slashes_that_a_path_lost_come_back(given, meant):
    assert full_url(given) == full_url(meant) == meant
    if "://" in meant:
        assert full_url(Path(meant)) == (meant if meant.startswith("tierfs") else str(Path(meant)))


@pytest.mark.parametrize("url", ["s3:/bucket/run", "s3//bucket/run", Path("s3://bucket/run"), "tierfs::s3//bucket/run"])
@pytest.mark.parametrize("door", [tierfs.dcp.TierWriter, tierfs.dcp.TierReader, Manager])
def test_nearly_a_url_is_no_path(url, door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="write tierfs::s3://bucket/run"):
        door(url)
    assert os.listdir() == []


TRAINER = """
import os
import sys
import torch
import torch.distributed.checkpoint as dcp

os.environ["TIERFS_DCP"] = sys.argv[2]
state = {"weight": torch.full((30, 20), 5.0), "step": 7}
dcp.save(state, checkpoint_id=sys.argv[1])
print("tierfs.dcp.installing" in sys.modules)
"""


@pytest.fixture
def as_installed(tmp_path):
    """The environment of a process in which tierfs is installed, with the entry points of this checkout."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "tierfs-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tierfs\nVersion: 0\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in of.items()) for group, of in groups)
    )
    return {**os.environ, "PYTHONPATH": f"{info.parent}{os.pathsep}{ROOT}"}


def train(environment, url, at_import, later):
    """Save in another process, with these values of ``TIERFS_DCP`` while torch is imported and later."""
    command = [sys.executable, "-W", "ignore", "-c", TRAINER, url, later]
    environment = {**environment, "TIERFS_DCP": at_import}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("installed")
def test_the_variable_alone_is_enough_from_the_first_save_on(as_installed, root, tmp_path):
    done = train(as_installed, f"tierfs::{tmp_path}/store/first", "1", "1")
    assert done.stdout == "True\n", done.stderr
    assert is_ours(f"{root}/first")
    assert load(f"{root}/first")["weight"][0, 0] == 5


def test_without_the_variable_nothing_is_loaded_and_later_it_warns(as_installed, root):
    done = train(as_installed, f"{root}/first", "0", "1")
    assert done.stdout == "False\n", done.stderr
    assert not is_ours(f"{root}/first")
    assert "call tierfs.dcp.install()" in done.stderr


IMPORTED = "torch._import_device_backends()"  # what torch calls at the end of its import
BROKEN = {
    "a value that says nothing": ("perhaps", IMPORTED, "TIERFS_DCP=perhaps: set it to 1 or to 0"),
    "a module is missing": (
        "1",
        f"sys.modules['tierfs.dcp.planner'] = None; {IMPORTED}",
        "import of tierfs.dcp.planner halted",
    ),
    # An older torch, which asks after its own parts are there.
    "an old torch": (
        "1",
        (
            "from torch.distributed.checkpoint import state_dict_loader; del state_dict_loader._load_state_dict; "
            f"{IMPORTED}"
        ),
        "_load_state_dict",
    ),
    "a broken configuration": ("1", f"{IMPORTED}; import tierfs.dcp.installing as it; assert it._replaced", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_is_broken_torch_is_imported(as_installed, tmp_path, name, monkeypatch):
    value, program, problem = BROKEN[name]
    (tmp_path / "config.toml").write_text("[[[")
    environment = {**as_installed, "TIERFS_DCP": value, "TIERFS_CONFIG": str(tmp_path / "config.toml")}
    program = f"import sys, torch; {program}; print(torch.ones(2).sum().item())"
    output = tmp_path / "output.txt"
    assert torch_importer.run(program, output, environment, monkeypatch) == 0, output.read_text()
    *lines, result = output.read_text().splitlines()
    assert result == "2.0"
    assert len(lines) == bool(problem), lines
    assert all(problem in line and "do not use tierfs" in line for line in lines)


def test_a_save_by_url_then_fails_instead_of_going_astray(as_installed, tmp_path):
    done = train(as_installed, f"tierfs::{tmp_path}/store/first", "perhaps", "1")
    assert done.returncode != 0
    assert "set it to 1 or to 0" in done.stderr
    assert "TierWriter(URL)" in done.stderr
    assert not list(tmp_path.rglob("first"))


@pytest.mark.usefixtures("installed")
def test_a_load_makes_memory_for_saves_once_training_begins(root, monkeypatch):
    monkeypatch.setenv("TIERFS_RAM", "64MiB")
    dcp.save(state(), checkpoint_id=f"{root}/step_1")
    writer = tierfs.dcp.TierWriter(root)
    found = {"weight": torch.zeros(30, 20), "moment": torch.zeros(4 << 20), "step": 0}
    dcp.load(found, checkpoint_id=f"{root}/step_1", planner=tierfs.dcp.TierLoadPlanner(allow_partial_load=True))
    before = writer.status()["tiers"]["ram"]["store_bytes"]
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.1).step()
    until(lambda: writer.status()["tiers"]["ram"]["store_bytes"] > before + (32 << 20))
