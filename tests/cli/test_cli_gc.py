"""``tierfs gc``, with the lease and grace that `init` sets."""

import json
import os

import pytest

from tierfs.cli.app import main
from tierfs.session import init


def gc(capsys, *words):
    capsys.readouterr()
    code = main(["gc", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def chunks(root):
    return sum(len(files) for _, _, files in os.walk(root / ".tierfs" / "chunks"))


def test_gc_waits_and_deletes(root, capsys):
    assert main(["rm", f"tierfs::file://{root}/b"]) == 0
    for _ in range(3):
        code, shown = gc(capsys, root, "--wait")
        assert code == 0
        if shown["runs"][-1]["deleted"]["count"]:
            break
        import time

        time.sleep(4.5)
    assert chunks(root) == 1
    assert main(["verify", f"tierfs::file://{root}/a"]) == 0


def test_gc_says_when_young_chunks_go(tmp_path, capsys):
    assert main(["init", str(tmp_path / "store")]) == 0
    (tmp_path / "a").write_bytes(os.urandom(100_000))
    assert main(["cp", str(tmp_path / "a"), f"tierfs::file://{tmp_path}/store/a"]) == 0
    assert main(["rm", f"tierfs::file://{tmp_path}/store/a"]) == 0
    capsys.readouterr()
    assert main(["gc", str(tmp_path / "store")]) == 0
    assert "young chunks a grace (3600 s) after they were written" in capsys.readouterr().out


def test_a_damaged_record_blocks_gc_with_a_code_of_its_own(root, capsys):
    record = root / ".tierfs" / "tree" / "a!"
    record.write_bytes(record.read_bytes()[:-1] + b"?")
    code, shown = gc(capsys, root)
    assert (code, shown["runs"][0]["blocked"]) == (12, True)
    assert main(["gc", str(root), "--without", "a"]) == 2
    for path in ("a", f"tierfs::file://{root}/a"):
        assert gc(capsys, root, "--without", path, "--yes")[0] == 0
    assert chunks(root) == 2


@pytest.mark.parametrize("everything", ["/", "tierfs::file://{root}/"])
def test_gc_gives_no_whole_store_up(root, capsys, everything):
    record = root / ".tierfs" / "tree" / "a!"
    record.write_bytes(record.read_bytes()[:-1] + b"?")
    assert main(["gc", str(root), "--without", everything.format(root=root), "--yes", "--exclusive"]) == 2
    assert chunks(root) == 2
    assert gc(capsys, root)[0] == 12


def test_gc_says_what_it_would_do(root, capsys):
    capsys.readouterr()
    assert main(["gc", str(root), "--dry-run"]) == 0
    assert "needed by 2 files" in capsys.readouterr().out


def test_a_lease_and_a_grace_are_fixed_when_the_store_is_made(root):
    store = init(str(root))
    assert (store.descriptor.lease_s, store.descriptor.grace_s) == (1, 2)
    assert init(str(root), lease_s=1, grace_s=2).descriptor == store.descriptor
    assert main(["init", str(root), "--grace", "100"]) == 2
    assert main(["init", str(root.parent / "other"), "--lease", "10", "--grace", "19"]) == 2
    assert main(["init", str(root.parent / "other"), "--lease", "0"]) == 2
    assert not (root.parent / "other").exists()
    assert init(str(root.parent / "other"), lease_s=600).descriptor.grace_s == 3600


@pytest.mark.parametrize("words", [["gc", "--rate"], ["scrub", "--max-seconds"]])
def test_infinity_is_no_limit_and_nan_is_refused(root, words):
    assert main([*words, "inf", str(root)]) == 0
    assert main([*words, "nan", str(root)]) == 2


@pytest.mark.parametrize("command", ["gc", "scrub", "repair"])
def test_a_part_of_a_store_is_refused(root, command):
    assert main([command, f"{root}/a"]) == 2
