"""``tierfs repair``."""

import json
import shutil
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tierfs.cli.app import main
from tierfs.dcp import TierWriter
from tierfs.format.header import CHECKSUM_BYTES, seal
from tierfs.objects import RetryingObjects, connect
from tierfs.session import descriptor
from tierfs.session import open as session_open
from tierfs.testing import Fault, FaultyObjects, PlannedFault


def repair(capsys, *words):
    capsys.readouterr()
    code = main(["repair", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    where = at if isinstance(at, slice) else slice(at % len(data), at % len(data) + 1)
    data[where] = bytes(byte ^ 1 for byte in data[where])
    path.write_bytes(data)


def test_a_sound_store_needs_nothing(root, capsys):
    code, shown = repair(capsys, root)
    assert (code, shown["whole"], shown["records"], shown["chunks"]) == (0, True, 2, 2)


def test_a_descriptor_whose_answer_was_lost_is_repaired(root, tmp_path, capsys, monkeypatch):
    place, copy = root / ".tierfs" / "store.json", tmp_path / "copy"
    shutil.copytree(root, copy)
    sound = place.read_bytes()
    flip(place, 20)
    lost = [PlannedFault(Fault.LOST_RESPONSE, "put")]
    monkeypatch.setattr(descriptor, "connect", lambda *place: RetryingObjects(FaultyObjects(connect(*place), lost)))
    code, shown = repair(capsys, root, "--from", str(copy))
    assert (code, place.read_bytes()) == (0, sound)
    assert str(copy) in shown["descriptor"]


@pytest.mark.parametrize("damage", [lambda place: place.unlink(), lambda place: flip(place, slice(90, 120))])
def test_a_lost_descriptor_comes_back_from_a_copy(root, tmp_path, capsys, damage):
    copy, other, place = tmp_path / "copy", tmp_path / "other", root / ".tierfs" / "store.json"
    shutil.copytree(root, copy)
    assert main(["init", str(other)]) == 0
    sound = place.read_bytes()
    damage(place)
    assert main(["repair", str(root), "--from", str(other)]) == 6, "it is no copy"
    assert main(["repair", str(root), "--from", str(copy), "--dry-run"]) == 0
    assert not place.exists() or place.read_bytes() != sound
    code, shown = repair(capsys, root, "--from", copy)
    assert (code, shown["descriptor"], place.read_bytes()) == (0, f"file://{copy}", sound)


@pytest.mark.parametrize("words", [["ls"], ["init"], ["gc"], ["repair"]])
def test_records_without_a_descriptor_are_no_place_for_a_store(root, capsys, monkeypatch, words):
    (root / ".tierfs" / "store.json").unlink()
    monkeypatch.setattr(session_open, "open_stores", {})  # as in another process
    monkeypatch.setenv("TIERFS_CREATE", "1")
    assert main([*words, str(root)]) == 6
    assert f"tierfs repair file://{root} --from" in capsys.readouterr().err
    assert not (root / ".tierfs" / "store.json").exists()


def test_a_command_for_a_whole_store_advises_to_make_one(tmp_path, capsys):
    assert main(["repair", f"{tmp_path}/not/there"]) == 3
    assert f"tierfs init file://{tmp_path}/not/there\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["repair", "scrub"])
def test_a_copy_is_read_while_local_tiers_are_asked_for(root, tmp_path, monkeypatch, command):
    monkeypatch.setenv("TIERFS_RAM", "64MiB")
    assert main(["ls", str(root)]) == 0
    shutil.copytree(root, tmp_path / "copy")
    assert main([command, str(root), "--from", str(tmp_path / "copy")]) == 0
    assert main(["verify", str(tmp_path / "copy")]) == 0


def test_data_is_read_where_that_is_asked_for(root, tmp_path, capsys):
    shutil.copytree(root, tmp_path / "copy")
    assert main(["rm", f"tierfs::file://{root}/b"]) == 0
    flip(min((root / ".tierfs" / "chunks").rglob("*.0"), key=lambda path: path.stat().st_mtime_ns))
    assert repair(capsys, root)[0] == 0, "nobody has looked"
    before = set(root.rglob("*"))
    code, shown = repair(capsys, root, "--read-data", "--dry-run")
    assert (code, [each["path"] for each in shown["lost"]]) == (6, ["a"])
    assert set(root.rglob("*")) == before, "nothing is noted"
    code, shown = repair(capsys, root, "--read-data", "--from", tmp_path / "copy")
    assert (code, len(shown["mended"])) == (0, 1)
    assert main(["verify", f"tierfs::file://{root}"]) == 0


def test_a_record_is_moved_aside_and_named(root, capsys):
    record = root / ".tierfs" / "tree" / "a!"
    flip(record)
    flip(record, 50)
    assert main(["repair", str(root)]) == 6
    out = capsys.readouterr().out
    assert "lost  a: its record" in out
    assert list((root / ".tierfs" / "lost").rglob("a!"))
    assert main(["verify", f"tierfs::file://{root}"]) == 0


def test_a_record_of_a_newer_tierfs_is_not_called_sound(root, capsys):
    record = root / ".tierfs" / "tree" / "a!"
    body = bytearray(record.read_bytes()[:-CHECKSUM_BYTES])
    body[8] += 1  # its format version
    record.write_bytes(seal(bytes(body)))
    code, shown = repair(capsys, root)
    assert (code, shown["whole"], shown["lost"], shown["lost_files"]) == (7, False, [], [])
    flip(root / ".tierfs" / "tree" / "b!")
    flip(root / ".tierfs" / "tree" / "b!", 50)
    assert main(["repair", str(root)]) == 6
    out = capsys.readouterr().out
    assert "1 files lost something; 1 records could not be read" in out
    assert main(["repair", str(root)]) == 7
    assert "nothing is lost" not in capsys.readouterr().out


def test_checkpoints_are_named_with_the_tensors_that_they_lost(root, capsys, monkeypatch):
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "0")  # the local tiers would still have the bytes
    url = f"tierfs::file://{root}/run"
    bases = torch.randint(0, 256, (9 << 20,), dtype=torch.uint8)
    for step in (1, 2):
        state = {f"layer.{number}": bases + 2 * step + number for number in range(2)}
        dcp.save(state, storage_writer=TierWriter(f"{url}/step_{step}", ack="object"), no_dist=True)
    max((root / ".tierfs" / "chunks").rglob("*.0"), key=lambda path: path.stat().st_mtime_ns).unlink()
    code, found = repair(capsys, root)
    assert code == 6
    assert [each["path"] for each in found["checkpoints"]] == ["run/step_2"]
    (loss,) = found["checkpoints"]
    assert loss["step"] == 2
    assert loss["names"]
    assert set(loss["names"]) <= set(state)
    main(["repair", str(root)])
    assert "checkpoint run/step_2 lost" in capsys.readouterr().out


class Broken(types.ModuleType):
    """A module that fails as torch does if a CUDA library is missing."""

    @property
    def checkpoint_losses(self):
        raise OSError("libcudart.so.13: cannot open shared object file")


@pytest.mark.parametrize("losses", [None, Broken("losses")])
def test_without_torch_repair_reports_all_but_checkpoints(root, capsys, monkeypatch, losses):
    min((root / ".tierfs" / "chunks").rglob("*.0"), key=lambda path: path.stat().st_mtime_ns).unlink()
    monkeypatch.setitem(sys.modules, "tierfs.checkpoint.verify", losses)  # its import fails
    code, shown = repair(capsys, root)
    assert (code, [each["path"] for each in shown["lost"]], shown["checkpoints"]) == (6, ["a"], None)
    assert main(["repair", str(root)]) == 6
    out, err = capsys.readouterr()
    assert "lost  a: " in out
    assert err.count("without their checkpoints") == 1
