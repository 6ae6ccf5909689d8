"""``tierfs probe`` finds out which promises an endpoint keeps, and notes them in the store."""

from __future__ import annotations

import json

import tierfs
from tierfs.cli import main


def test_it_says_what_a_place_without_a_store_keeps_and_leaves_nothing_there(tmp_path, capsys):
    (tmp_path / "store").mkdir()
    assert main(["probe", str(tmp_path / "store")]) == 0
    printed = capsys.readouterr().out
    assert "kept  conditional create" in printed
    assert f"make one with: tierfs init file://{tmp_path}/store" in printed
    assert not list((tmp_path / "store").iterdir())


def test_a_directory_that_is_not_there_is_not_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    for path in ("a/b", "file", "file/below"):
        assert main(["probe", str(tmp_path / path)]) == 3
        assert "is not a directory: create it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_store_is_found_from_below_and_stays_as_it_was(tmp_path, capsys):
    store = tierfs.init(str(tmp_path))
    before = (tmp_path / ".tierfs/store.json").read_bytes()
    assert main(["probe", str(tmp_path / "run/step_1"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["url"], told["has_store"], told["noted"]) == (store.url, True, False)
    assert told["single_writer"] is False
    assert all(test["kept"] for test in told["tests"])
    assert (tmp_path / ".tierfs/store.json").read_bytes() == before


def test_a_probe_notes_changes_in_the_store(tmp_path, capsys, monkeypatch):
    tierfs.init(str(tmp_path))
    from tierfs.objects import OVERWRITE, LocalObjects

    put = LocalObjects.put
    monkeypatch.setattr(
        LocalObjects, "put", lambda self, key, data, *, mode=OVERWRITE, checksum=None: put(self, key, data)
    )
    assert main(["probe", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["noted"]
    assert told["single_writer"]
    assert "conditional updates" in told["cannot_promise"]
    found = json.loads((tmp_path / ".tierfs/store.json").read_text())
    assert found["single_writer"]
    assert found["endpoint"]["checksums"] == []
    assert main(["probe", str(tmp_path)]) == 0
    assert "with the same result recorded" in capsys.readouterr().out


def test_a_probes_lost_answer_is_no_conflict(tmp_path, monkeypatch):
    tierfs.init(str(tmp_path))
    from tierfs.errors import StoreError
    from tierfs.format import keys
    from tierfs.objects import OVERWRITE, LocalObjects

    put = LocalObjects.put
    lost = []

    def heed_no_checksum(self, key, data, *, mode=OVERWRITE, checksum=None):
        info = put(self, key, data, mode=mode)
        if key == keys.DESCRIPTOR and not lost:
            lost.append(key)
            raise StoreError("the answer was lost", transient=True)
        return info

    monkeypatch.setattr(LocalObjects, "put", heed_no_checksum)
    assert main(["probe", str(tmp_path)]) == 0
    assert lost
    assert json.loads((tmp_path / ".tierfs/store.json").read_text())["endpoint"]["checksums"] == []


def test_an_empty_argument_is_no_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["probe", ""]) == 2
    assert "an argument is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
