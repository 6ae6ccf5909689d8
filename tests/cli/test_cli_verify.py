"""``verify`` finds planted damage, names it, and ends with exit code 6."""

import json
import random
import re
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import tierfs
from tierfs.cli import main
from tierfs.store import copy, save

BIG = random.Random(3).randbytes(300_000)


@pytest.fixture
def root(tmp_path):
    """The directory of a store that holds three files."""
    store = tierfs.init(str(tmp_path / "store"))
    save(store, "run/big", BIG)
    save(store, "run/other", BIG[::-1])
    save(store, "run/small", b"small")
    return tmp_path / "store"


def chunk_of(url, capsys):
    """Return the key of a file's only chunk."""
    assert main(["stat", "--chunks", url, "--json"]) == 0
    (chunk,) = json.loads(capsys.readouterr().out)["chunk_table"]
    return chunk["key"]


def test_a_sound_store_passes(root, capsys):
    assert main(["verify", str(root)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"checked 3 records, 2 chunks, 586 KiB below tierfs::file://{root}: all sound\n"
    assert shown.err == ""
    assert main(["verify", str(root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "url": f"tierfs::file://{root}",
        "files": 3,
        "chunks": 2,
        "raw_bytes": 2 * len(BIG),
        "damage": [],
        "unread": [],
        "vanished": [],
    }


def test_a_host_with_peers_verifies_without_them(root, capsys, monkeypatch):
    monkeypatch.setenv("TIERFS_PEERS", "1")
    monkeypatch.setenv("TIERFS_PEER_LISTEN", "127.0.0.1")
    assert main(["verify", str(root)]) == 0
    assert "all sound" in capsys.readouterr().out


def test_a_sample_by_other_processes_at_a_bandwidth(root, capsys):
    words = ["--sample", "99.9999%", "--bandwidth", "1GB", "--executor", "processes:1"]
    assert main(["verify", str(root), *words]) == 0
    assert "a sample of" in capsys.readouterr().out
    for bad in (["--sample", "0%"], ["--sample", "0.5"], ["--bandwidth", "0"]):
        assert main(["verify", str(root), *bad]) == 2


class Leaving(MemoryFileSystem):
    """A filesystem that answers nothing more when a chunk is read."""

    protocol = "leaving"
    leaves, refused = False, 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("leaving://"))

    def _meet(self, path):
        if Leaving.refused or (Leaving.leaves and "/chunks/" in path):
            Leaving.refused += 1
            raise ConnectionError("no answer")

    def cat_file(self, path, *args, **options):
        self._meet(path)
        return super().cat_file(path, *args, **options)

    def info(self, path, **options):
        self._meet("")
        return super().info(path, **options)


def test_a_store_that_stops_answering_is_not_called_damaged_nor_asked_on(capsys, monkeypatch):
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "0")
    fsspec.register_implementation("leaving", Leaving, clobber=True)
    store = tierfs.init("leaving:///bucket/root")
    for number in range(60):
        save(store, f"run/{number}", BIG[number:])
    Leaving.leaves = True
    assert main(["verify", "leaving:///bucket/root"]) == 8
    assert re.search(r": 0 damaged, \d+ could not be read: try again", capsys.readouterr().out)
    assert Leaving.refused < 150, "60 chunks, 5 attempts each"


def test_damage_is_named_for_each_file_that_shares_the_chunk(root, capsys):
    store = tierfs.init(str(root))
    for path in ("run2/same", "run2/twice", "elsewhere"):
        save(store, path, BIG)
    copy(store, "run/big", "run/copy")
    chunk = root / chunk_of(f"{root}/run/big", capsys)
    chunk.unlink()
    for below, paths in (
        ("", ["elsewhere", "run/big", "run/copy", "run2/same", "run2/twice"]),
        ("/run", ["run/big", "run/copy"]),
    ):
        assert main(["verify", f"{root}{below}", "--json"]) == 6
        damage = json.loads(capsys.readouterr().out)["damage"]
        assert [each["path"] for each in damage] == paths
        assert all(f"{root}/{each['path']}: chunk" in each["problem"] for each in damage)
    assert main(["verify", str(root)]) == 6
    assert "2 chunks" in capsys.readouterr().out, "it is read once"


def test_a_truncated_chunk_is_found_and_named(root, capsys):
    key = chunk_of(f"{root}/run/big", capsys)
    chunk = root / key
    chunk.chmod(0o644)
    with open(chunk, "r+b") as file:
        file.truncate(1000)
    assert main(["verify", str(root), "--json"]) == 6
    (damage,) = json.loads(capsys.readouterr().out)["damage"]
    assert (damage["path"], damage["key"], damage["kind"]) == ("run/big", key, "corruption")
    assert "run/big" in damage["problem"]
    assert main(["verify", str(root)]) == 6
    shown = capsys.readouterr().out
    assert "damaged  run/big\n" in shown
    assert re.search(rf"^  key +{re.escape(key)}$", shown, flags=re.MULTILINE)
    assert shown.endswith(": 1 damaged\n")
    assert main(["verify", f"{root}/run/other"]) == 0


def test_a_missing_chunk_a_damaged_manifest_and_a_stray_object_are_found(root, capsys):
    (root / chunk_of(f"{root}/run/big", capsys)).unlink()
    manifest = root / ".tierfs" / "tree" / "run" / "other!"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    (root / ".tierfs" / "chunks" / "stray").write_bytes(b"x")
    assert main(["verify", str(root), "--json"]) == 6
    damage = {item["path"]: item for item in json.loads(capsys.readouterr().out)["damage"]}
    assert set(damage) == {"run/big", "run/other", ".tierfs/chunks/stray"}
    assert main(["cat", f"{root}/run/other"]) == 6
    shown = capsys.readouterr().err
    assert "run/other" in shown
    assert "tierfs verify" in shown


def test_progress_is_shown_while_everything_is_read(root, capsys):
    assert main(["verify", str(root), "--progress"]) == 0
    assert "586 KiB" in capsys.readouterr().err


def test_a_relative_path_is_enough(root, capsys, monkeypatch):
    monkeypatch.chdir(root)
    assert main(["verify", "run"]) == 0
    assert f"below tierfs::file://{root}/run" in capsys.readouterr().out
    assert Path.cwd() == root


def test_control_characters_of_the_url_itself_are_escaped(root, capsys):
    for path in ("run\x1b[31m", "gone\x1b[31m"):
        save(tierfs.init(str(root)), "run\x1b[31m/file", BIG)
        main(["verify", f"{root}/{path}"])
        shown = capsys.readouterr()
        assert "\\x1b[31m" in shown.out + shown.err
        assert "\x1b" not in shown.out + shown.err
