"""``tierfs`` alone shows the stores of this host."""

import json
import shutil

import pytest

from tierfs.cli.app import main


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_RAM", "16MiB")
    monkeypatch.setenv("TIERFS_NVME", "0")


def write(tmp_path, name):
    root = tmp_path / name
    assert main(["init", str(root)]) == 0
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert main(["cp", str(tmp_path / "file"), f"tierfs::file://{root}/file"]) == 0
    return root


@pytest.mark.usefixtures("state")
def test_a_host_without_stores_is_told_how_to_make_one(capsys):
    assert main([]) == 0
    assert "`tierfs init URL` creates one" in capsys.readouterr().out


@pytest.mark.usefixtures("state")
def test_stores_in_directories_that_are_gone_are_counted_and_not_listed(tmp_path, capsys):
    here, gone = write(tmp_path, "here"), write(tmp_path, "gone")
    assert main(["flusher", "stop", str(gone)]) == 0
    shutil.rmtree(gone)
    capsys.readouterr()
    assert main([]) == 0
    out = capsys.readouterr().out
    assert str(here) in out
    assert str(gone) not in out
    assert "1 more were in directories that no longer exist" in out
    assert main(["--json"]) == 0
    stores = json.loads(capsys.readouterr().out)["stores"]
    assert {store["place"]: store["is_gone"] for store in stores} == {str(here): False, str(gone): True}
