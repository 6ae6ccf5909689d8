"""torch's code for local paths refuses a tierfs URL, names an alternative, and leaves the working directory empty."""

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file as numpy_save_file
from safetensors.torch import save_file, save_model
from torch.distributed.checkpoint import _consolidate_hf_safetensors, filesystem, format_utils
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

import tierfs
from tierfs.dcp.guard import guard
from tierfs.errors import InvalidInputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A store's URL. The working directory must stay empty."""
    tierfs.init(f"file://{tmp_path}/store")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield f"tierfs::file://{tmp_path}/store"
    assert os.listdir(here) == []


FORMS = {
    "text": str,
    "path": Path,
    "absolute": lambda url: Path(url).absolute(),
    "slash": lambda url: url.replace("file://", ""),
    "relative": lambda _url: "tierfs::step_1",
    "named": lambda _url: "tierfs://mine/step_1",
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def target(root, request):
    return request.param(f"{root}/step_1")


class Derived(filesystem.FileSystemWriter):
    """A framework's own writer."""


STATE = {"w": torch.arange(3.0)}
CALLS = {
    "writer": (filesystem.FileSystemWriter, "TierWriter"),
    "reader": (filesystem.FileSystemReader, "TierReader"),
    "hugging face writer": (lambda url: HuggingFaceStorageWriter(path=url), "TierWriter"),
    "hugging face reader": (lambda url: HuggingFaceStorageReader(path=url), "TierReader"),
    "torch.save": (lambda url: torch.save(STATE, url), "fsspec.open"),
    "torch.save of old": (lambda url: torch.save(STATE, url, _use_new_zipfile_serialization=False), "fsspec.open"),
    "torch.load": (torch.load, "fsspec.open"),
    "save_file": (lambda url: save_file(STATE, url), "safetensors.torch.save("),
    "save_file of numpy": (lambda url: numpy_save_file({"w": STATE["w"].numpy()}, url), "safetensors.torch.save("),
    "save_model": (lambda url: save_model(torch.nn.Linear(2, 2), os.fspath(url)), "safetensors.torch.save("),
    "torch.load mapped": (lambda url: torch.load(url, mmap=True), "fsspec.open"),
    "torch.load of safetensors": (lambda url: torch.load(f"{os.fspath(url)}/x.safetensors"), "fsspec.open"),
    "dcp_to_torch_save": (lambda url: format_utils.dcp_to_torch_save(url, "out"), "TierReader"),
    "torch_save_to_dcp": (lambda url: format_utils.torch_save_to_dcp(url, "out"), "torch.load"),
    "consolidate in": (
        lambda url: _consolidate_hf_safetensors.consolidate_safetensors_files(url, "out", {"w": 1}),
        "tierfs cp -r",
    ),
    "consolidate out": (
        lambda url: _consolidate_hf_safetensors.consolidate_safetensors_files_on_every_rank("in", url, {"w": 1}),
        "tierfs cp -r",
    ),
}


def refused(call):
    """Return the message with which a call is refused."""
    # `save_model` of safetensors raises a plain ValueError with the text of the error.
    with pytest.raises((ValueError, CheckpointException)) as raised:
        call()
    error = raised.value
    if isinstance(error, CheckpointException):
        (error, _), *_ = error.failures.values()
        assert isinstance(error, InvalidInputError)
    return str(error)


@pytest.mark.parametrize(("call", "advice"), CALLS.values(), ids=CALLS)
def test_torchs_own_refuse_a_url(target, call, advice):
    message = refused(lambda: call(target))
    assert advice in message


def test_the_advice_can_be_followed(root):
    url = f"{root}/step_1"
    message = refused(lambda: filesystem.FileSystemWriter(Path(url)))
    call = message.partition("use ")[2]
    exec(call, {"dcp": dcp, "tierfs": tierfs, "state": STATE})
    call = refused(lambda: filesystem.FileSystemReader(Path(url))).partition("use ")[2]
    found = {"w": torch.zeros(3)}
    exec(call, {"dcp": dcp, "tierfs": tierfs, "state": found})
    assert torch.equal(found["w"], STATE["w"])


@pytest.mark.parametrize("form", [Path, lambda url: url.replace("file://", "")], ids=["path", "slash"])
def test_an_id_that_torch_takes_for_a_directory_is_refused(root, form):
    url = form(f"{root}/step_1")
    for call in (dcp.save, lambda *args, **kwargs: dcp.async_save(*args, **kwargs).result(), dcp.load):
        assert "tierfs.dcp.Tier" in refused(lambda call=call: call(dict(STATE), checkpoint_id=url))


def test_a_writer_that_is_sent_to_a_url_later_refuses_it(root, tmp_path):
    for kind in (filesystem.FileSystemWriter, Derived):
        writer = kind(tmp_path / "local")
        assert "TierWriter" in refused(
            lambda writer=writer: dcp.save(dict(STATE), storage_writer=writer, checkpoint_id=f"{root}/step_1")
        )
    assert "TierWriter" in refused(lambda: dcp.save(dict(STATE), storage_writer=Derived(f"{root}/step_1")))


def test_the_experimental_writer_refuses_a_url(root):
    from torch.distributed.checkpoint._experimental.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig
    from torch.distributed.checkpoint._experimental.types import RankInfo

    writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(0, 1))
    assert "TierWriter" in refused(lambda: writer.write(f"{root}/step_1", STATE))


def test_functions_that_take_urls_still_work(root, tmp_path):
    dcp.save(STATE, storage_writer=FsspecWriter(f"{root}/stock"))
    dcp.save(STATE, checkpoint_id=f"{root}/by_url")
    for name in ("stock", "by_url"):
        found = {"w": torch.zeros(3)}
        dcp.load(found, storage_reader=FsspecReader(f"{root}/{name}"))
        assert torch.equal(found["w"], STATE["w"])
    for place in (tmp_path / "a", str(tmp_path / "b"), tmp_path / "tierfs" / "c"):
        dcp.save(STATE, storage_writer=filesystem.FileSystemWriter(place))
        found = {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=place)
        assert torch.equal(found["w"], STATE["w"])
        torch.save(STATE, f"{place}/file")
        assert torch.equal(torch.load(f"{place}/file")["w"], STATE["w"])
    with fsspec.open(f"{root}/file", "wb") as file:
        torch.save(STATE, file)
    with fsspec.open(f"{root}/file", "rb") as file:
        assert torch.equal(torch.load(file)["w"], STATE["w"])
    stream = io.BytesIO()
    torch.save(STATE, stream)
    assert pickle.loads(pickle.dumps(torch.load)) is torch.load


def test_wrong_calls_fail_as_they_did():
    with pytest.raises(TypeError):
        filesystem.FileSystem().mkdir()
    with pytest.raises(TypeError):
        filesystem.FileSystemWriter()
    with pytest.raises(AttributeError, match="expected 'f' to be string, path"):
        torch.save({}, 3)


def test_doing_it_again_changes_nothing():
    before = torch.serialization._is_path, filesystem.FileSystem.mkdir, list(sys.meta_path)
    guard()
    assert (torch.serialization._is_path, filesystem.FileSystem.mkdir, list(sys.meta_path)) == before


ORDERS = {
    "tierfs first": "import tierfs, torch, torch.distributed.checkpoint as dcp; from safetensors.torch import save_file",
    "torch first": "import torch, torch.distributed.checkpoint as dcp; from safetensors.torch import save_file; import tierfs",
    "safetensors first": "from safetensors.torch import save_file; import torch, torch.distributed.checkpoint as dcp",
    "between": "import torch, safetensors, tierfs, torch.distributed.checkpoint as dcp; from safetensors.torch import save_file",
    "torch alone": "import torch, torch.distributed.checkpoint as dcp; from safetensors.torch import save_file",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_order_of_imports_does_not_matter(order, tmp_path):
    if order in (ORDERS["torch alone"], ORDERS["safetensors first"]):
        pytest.importorskip("importlib.metadata")
        from importlib.metadata import entry_points

        if not [point for point in entry_points(group="torch.backends") if point.name == "tierfs"]:
            pytest.skip("tierfs is not installed here, so torch does not call it")
    code = f"""{order}
import inspect
from torch.distributed.checkpoint import filesystem
assert filesystem.__loader__ is filesystem.__spec__.loader and inspect.getsource(filesystem.FileSystem)
url = "tierfs::file:///x"
for call in (lambda: torch.save(1, url), lambda: dcp.FileSystemWriter(url), lambda: save_file({{}}, url)):
    try:
        call()
    except ValueError as error:
        print(type(error).__name__)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert run.stdout.split() == ["InvalidInputError"] * 3, run.stderr
    assert "is unknown" not in run.stderr
    assert os.listdir(tmp_path) == []


def test_a_torch_that_is_made_otherwise_is_imported_all_the_same(tmp_path):
    code = """
import sys, tierfs, types
from tierfs.dcp import guard
assert "torch" not in sys.modules
sys.modules["torch.serialization"] = types.ModuleType("torch.serialization")
guard.guard()
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "torch.serialization of this torch is unknown" in run.stderr
