"""A process reports at its end the folders that path code made of a URL. So does ``tierfs status``."""

import os
import pathlib
import subprocess
import sys

import pytest

import tierfs
from tierfs import misplaced as module
from tierfs.cli import main
from tierfs.misplaced import misplaced

URLS = {
    "tierfs::file:///data/store/run": "tierfs::file:",
    "tierfs::s3://bucket/run": "tierfs::s3:",
    "tierfs://prod/run": "tierfs:",
    "tierfs:/data": "tierfs:",
    "tierfs::/data": "tierfs::",
}


def ended(directory, code, **environment):
    """Return the stderr of a process that runs this code in a directory."""
    root = str(pathlib.Path(tierfs.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize("url", URLS)
def test_a_folder_made_of_a_url_is_found(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    assert misplaced() == []
    os.makedirs(url)
    (tmp_path / "other").mkdir()
    assert misplaced() == [f"{tmp_path}/{URLS[url]}"]


def test_it_is_named_when_the_process_ends(tmp_path):
    code = "import tierfs, pathlib; pathlib.Path('tierfs::file:///data/store/run').mkdir(parents=True)"
    said = ended(tmp_path, code)
    assert said.startswith(f"{tmp_path}/tierfs::file: was created by code that took a tierfs URL for a local path")
    assert len(said.splitlines()) == 1


def test_it_is_named_once_and_wherever_the_process_went(tmp_path):
    (tmp_path / "away").mkdir()
    said = ended(
        tmp_path, "import tierfs, os; os.makedirs('tierfs://prod/run'); os.chdir('away'); os.mkdir('tierfs::')"
    )
    assert [line.partition(" was created")[0] for line in said.splitlines()] == [
        f"{tmp_path}/away/tierfs::",
        f"{tmp_path}/tierfs:",
    ]


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        ("import tierfs", {}),
        ("import tierfs, os; os.mkdir('tierfs:')", {"LOCAL_RANK": "3"}),
        ("import tierfs, os\nos.mkdir('tierfs:')\nif os.fork():\n os.wait()\n os.rmdir('tierfs:')", {}),
        ("import tierfs, os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", {}),
        ("import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); import tierfs", {}),
        ("import tierfs, tierfs.cli, os; os.mkdir('tierfs:'); tierfs.cli.main(['version'])", {}),
    ],
    ids=["nothing", "another rank", "a fork", "removed since", "removed before", "a command"],
)
def test_nothing_is_said(tmp_path, code, environment):
    assert ended(tmp_path, code, **environment) == ""


def test_a_directory_that_cannot_be_read_holds_none(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(module.os, "scandir", refuse)
    assert misplaced(str(tmp_path)) == []


def test_status_names_it(tmp_path, monkeypatch, capsys):
    url = f"file://{tmp_path}/store"
    tierfs.init(url)
    monkeypatch.chdir(tmp_path)
    assert main(["status", url]) == 0
    assert "used a tierfs URL as a local path" not in capsys.readouterr().out
    os.makedirs("tierfs::file:/data")
    assert main(["status", url]) == 0
    assert f"{tmp_path}/tierfs::file:" in capsys.readouterr().out
    fs = tierfs.TierFileSystem(target_protocol="file", skip_instance_cache=True)
    assert fs.status(f"{tmp_path}/store")["misplaced"] == [f"{tmp_path}/tierfs::file:"]
