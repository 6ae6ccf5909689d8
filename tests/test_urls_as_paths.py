"""Python refuses a tierfs URL as a local path, and ``tierfs status`` names folders that were made of one."""

import glob  # noqa: F401 - for `CALLS`, as tempfile
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile  # noqa: F401
import textwrap

import pytest

import tierfs
from tierfs import urls_as_paths as module
from tierfs.cli import main
from tierfs.errors import InvalidInputError
from tierfs.urls_as_paths import misplaced

URLS = (
    "tierfs::file:///data/store/run",
    "tierfs::s3://bucket/run",
    "tierfs://prod/run",
    "tierfs:/data",
    "tierfs::/data",
)

CALLS = {
    "makedirs": "os.makedirs(url, exist_ok=True)",
    "Path.mkdir": "pathlib.Path(url).mkdir(parents=True, exist_ok=True)",
    "absolute": "os.makedirs(os.path.abspath(url))",
    "joined": "os.makedirs(os.path.join('runs', url))",
    "open": "open(f'{url}/a', 'w')",
    "open to read": "open(f'{url}/a')",
    "os.open": "os.open(f'{url}/a', os.O_WRONLY | os.O_CREAT)",
    "copytree": "shutil.copytree('made', url)",
    "mkdtemp": "tempfile.mkdtemp(dir=url)",
    "glob": "glob.glob(f'{url}/*')",
    "walk": "list(os.walk(url))",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_python_refuses_a_url_as_a_path(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for name in ("made", "runs"):
        os.mkdir(name)
    for url in URLS:
        with pytest.raises(InvalidInputError, match=r"use fsspec.open\(URL, mode\)"):
            exec(call, {**globals(), "url": url})
    assert sorted(os.listdir()) == ["made", "runs"]
    assert os.listdir("runs") == []


FRAMEWORKS = {
    "transformers": "fs.put",
    "accelerate": "fs.put",
    "lightning": "TierCheckpoint(URL)",
    "pytorch_lightning": "TierCheckpoint(URL)",
    "wandb": "wandb.init(dir=...)",
    "tensorboardX": "torch.utils.tensorboard.SummaryWriter(URL)",
    "safetensors": "safetensors.torch.save(",
    "torch.distributed.checkpoint": "TierWriter(URL)",
    "unknown": "fsspec.open(URL, mode)",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("inner", ["", "safetensors.torch", "torch.serialization"])
def test_the_refusal_names_the_way_of_the_framework(tmp_path, monkeypatch, framework, inner):
    monkeypatch.chdir(tmp_path)
    below = {"__name__": inner or f"{framework}.inside"}
    exec("import os\ndef save(url): os.makedirs(url)", below)
    called = {"__name__": f"{framework}.saving", "below": below["save"]}
    exec("def save(url): below(url)", called)
    advice = FRAMEWORKS[framework]
    if inner and framework == "unknown":  # a program that calls the inner one
        advice = "safetensors.torch.save(" if inner.startswith("safetensors") else "torch.save("
    with pytest.raises(InvalidInputError) as raised:
        called["save"]("tierfs::s3://bucket/run")
    assert f"use {advice}" in str(raised.value) or advice in str(raised.value).partition("use ")[2]
    assert os.listdir() == []


def test_a_folder_from_before_can_be_read_and_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("made")
    pathlib.Path("made/a").write_text("one")
    os.rename("made", "tierfs::file:")
    assert misplaced() == [f"{tmp_path}/tierfs::file:"]
    assert pathlib.Path("tierfs::file:/a").read_text() == "one"
    with pytest.raises(InvalidInputError):
        pathlib.Path("tierfs::file:/a").write_text("two")
    shutil.rmtree(tmp_path)


def test_paths_that_are_no_urls_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tierfs", "my-tierfs:", "tierfs:x", "tierfs.d/a", b"b"):
        os.makedirs(name)


def test_files_opened_at_the_interpreters_end_are_taken():
    code = """
        import tierfs.urls_as_paths as module
        class Last:
            def __del__(self, open=open):
                open("/dev/null").close()
        module.last = Last()  # freed when the names before it are None
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_directory_that_cannot_be_read_holds_none(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(module.os, "scandir", refuse)
    assert misplaced(str(tmp_path)) == []


def test_status_names_it(tmp_path, monkeypatch, capsys):
    url = f"file://{tmp_path}/store"
    tierfs.init(url)
    monkeypatch.chdir(tmp_path)
    os.mkdir("made")
    assert main(["status", url]) == 0
    assert "used a tierfs URL as a local path" not in capsys.readouterr().out
    os.rename(tmp_path / "made", "tierfs::file:")
    assert main(["status", url]) == 0
    assert f"{tmp_path}/tierfs::file:" in capsys.readouterr().out
    fs = tierfs.TierFileSystem(target_protocol="file", skip_instance_cache=True)
    assert fs.status(f"{tmp_path}/store")["misplaced"] == [f"{tmp_path}/tierfs::file:"]
