"""``tierfs scrub``."""

import json
import os

import pytest

from tierfs.cli.app import main


def scrub(capsys, *words):
    capsys.readouterr()
    code = main(["scrub", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def damage(root):
    path = next(path for path in (root / ".tierfs" / "chunks").rglob("*.0"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return path


def test_scrub_says_what_is_damaged_and_exits_with_6(root, capsys):
    assert scrub(capsys, root)[0] == 0
    path = damage(root)
    code, shown = scrub(capsys, root)
    assert (code, [each["key"] for each in shown["damage"]]) == (6, [str(path.relative_to(root))])
    assert main(["scrub", str(root), "--max-seconds", "0"]) == 6
    assert "found by an earlier run" in capsys.readouterr().out


def test_scrub_heals_from_another_store(root, tmp_path, capsys):
    os.system(f"cp -r {root} {tmp_path}/copy")
    path = damage(root)
    code, shown = scrub(capsys, root, "--from", tmp_path / "copy")
    assert (code, shown["sound"]) == (0, True)
    assert path.read_bytes() == (tmp_path / "copy" / path.relative_to(root)).read_bytes()


def test_scrub_in_other_processes(root, capsys):
    path = damage(root)
    code, shown = scrub(capsys, root, "--executor", "processes:2")
    assert (code, shown["chunks"], shown["prefixes_done"]) == (6, 2, 256)
    assert [each["key"] for each in shown["damage"]] == [str(path.relative_to(root))]


@pytest.mark.parametrize(
    "words",
    [
        ["--executor", "threads"],
        ["--executor", "processes:0"],
        ["--executor", "dask:"],
        ["--bandwidth", "0"],
        ["--concurrency", "0"],
        ["--tier", "nvme", "--no-heal"],
    ],
)
def test_invalid_arguments_are_refused(root, words):
    assert main(["scrub", str(root), *words]) == 2


def test_a_tier_that_holds_nothing_is_sound(root, capsys):
    code, shown = scrub(capsys, root, "--tier", "ram")
    assert (code, shown["tier"], shown["is_whole_round"]) == (0, "ram", True)
