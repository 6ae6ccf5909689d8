"""``materialize`` and ``sync`` copy differences and delete extra files; an interrupted run can be resumed."""

import errno
import json
import os
import random
import stat

import pytest

from tierfs.cli import main
from tierfs.cli.files import transfer
from tierfs.cli.files.mirror import PART_PREFIX
from tierfs.format.keys import chunk_key
from tierfs.store import Writer, delete, find, load, save
from tierfs.store import stat as stat_stored

RANDOM = random.Random(5)
BIG = RANDOM.randbytes((32 << 20) + 5)
FILES = {"a": b"small", "zero": b"", "d/big": BIG, "d/e/deep é": RANDOM.randbytes(100_000)}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def url(url):
    return f"{url}/run"


@pytest.fixture
def stored(url, store):
    for name, content in FILES.items():
        save(store, f"run/{name}", content)
    return url


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "empty").mkdir()
    return root


def below(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def in_store(store):
    return {one.path[4:]: load(store, one.path) for one in find(store, "run") if not one.is_directory}


def run(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_directory_is_materialized_and_then_left_as_it_is(stored, tmp_path, capsys):
    root = tmp_path / "out"
    total = sum(map(len, FILES.values()))
    counts = {"files": 4, "unchanged": 0, "deleted": 0, "read_bytes": total, "shared_bytes": 0, "kept_bytes": 0}
    assert run(capsys, "materialize", stored, root) == counts
    assert below(root) == FILES
    done = run(capsys, "materialize", stored, root)
    assert (done["files"], done["unchanged"], done["read_bytes"]) == (0, 4, 0)


@pytest.mark.parametrize("place", ["store", "store/run", "store/other/new", "link"])
def test_a_target_inside_a_store_is_refused(stored, tmp_path, capsys, place):
    (tmp_path / "link").symlink_to(tmp_path / "store")
    before = below(tmp_path / "store")
    assert main(["materialize", stored, str(tmp_path / place)]) == 2
    assert f"is in the store at {tmp_path}/store" in capsys.readouterr().err
    assert below(tmp_path / "store") == before


def test_a_file_that_changed_on_either_side_is_written_and_chunks_that_did_not_are_kept(
    stored, store, tmp_path, capsys
):
    root = tmp_path / "out"
    run(capsys, "materialize", stored, root)
    changed = BIG[:-5] + b"other"
    save(store, "run/d/big", changed)
    kept_times = os.stat(root / "a")
    (root / "a").write_bytes(b"SMALL")
    os.utime(root / "a", ns=(kept_times.st_atime_ns, kept_times.st_mtime_ns))
    done = run(capsys, "materialize", stored, root)
    assert below(root) == {**FILES, "d/big": changed}
    assert done["files"] == 2
    assert done["kept_bytes"] == 32 << 20
    assert done["read_bytes"] == 10


def test_without_a_record_files_are_compared_and_not_copied(stored, tmp_path, capsys):
    root = tmp_path / "out"
    run(capsys, "materialize", stored, root)
    for path in (tmp_path / "state" / "mirrors").iterdir():
        path.unlink()
    done = run(capsys, "materialize", stored, root)
    assert (done["files"], done["unchanged"], done["read_bytes"]) == (0, 4, 0)


def test_an_interrupted_file_goes_on_where_it_was(stored, store, tmp_path, capsys, monkeypatch):
    root = tmp_path / "out"
    monkeypatch.setattr(transfer, "WINDOW_BYTES", 16 << 20)
    chunk = tmp_path / "store" / chunk_key(stat_stored(store, "run/d/big").manifest.rows[1].name)
    chunk.rename(tmp_path / "aside")
    assert main(["materialize", stored, str(root)]) == 6
    capsys.readouterr()
    assert not (root / "d/big").exists()
    (tmp_path / "aside").rename(chunk)
    done = run(capsys, "materialize", stored, root)
    assert below(root) == FILES
    assert done["kept_bytes"] == 16 << 20


def test_a_full_disk_is_told_with_the_name_of_the_file_whose_part_can_be_completed(
    tree, url, tmp_path, capsys, monkeypatch
):
    (tree / "a").chmod(0o400)
    run(capsys, "sync", tree, url)

    def fail(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)  # as NFS and quotas do
    assert main(["materialize", url, str(tmp_path / "out"), "--json"]) == 9
    assert json.loads(capsys.readouterr().out)["error"]["path"].startswith(f"{tmp_path}/out/")
    parts = list((tmp_path / "out").rglob(f"{PART_PREFIX}*"))
    assert parts
    assert all(stat.S_IMODE(part.stat().st_mode) & 0o200 for part in parts)


def test_delete_removes_what_the_store_does_not_have(stored, store, tmp_path, capsys):
    root = tmp_path / "out"
    run(capsys, "materialize", stored, root)
    delete(store, "run/d/e/deep é")
    (root / "mine" / "too").mkdir(parents=True)
    (root / "mine" / "file").write_bytes(b"x")
    (root / "link").symlink_to("a")
    (root / "a").unlink()
    for name in (".", "gone", "a"):  # a file replaces the directory `a`
        (root / name).mkdir(exist_ok=True)
        (root / name / f"{PART_PREFIX}old").write_bytes(b"x")
    assert main(["materialize", stored, str(root)]) == 2
    assert "--delete" in capsys.readouterr().err
    assert (root / "mine" / "file").exists()
    assert run(capsys, "materialize", stored, root, "--delete")["deleted"] == 3
    assert below(root) == {name: content for name, content in FILES.items() if "deep" not in name}
    assert sorted(path.name for path in root.iterdir()) == ["a", "d", "zero"]


def test_a_file_in_place_of_a_directory_needs_delete(stored, tmp_path, capsys):
    root = tmp_path / "out"
    root.mkdir()
    (root / "d").write_bytes(b"x")
    assert main(["materialize", stored, str(root)]) == 2
    run(capsys, "materialize", stored, root, "--delete")
    assert below(root) == FILES


def test_a_directory_that_cannot_be_removed_is_named(stored, tmp_path, capsys, monkeypatch):
    root = tmp_path / "out"
    (root / "more").mkdir(parents=True)

    def rmdir(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    assert main(["materialize", stored, str(root), "--delete"]) == 1
    assert f"{root}/more: Device or resource busy" in capsys.readouterr().err
    assert {name: data for name, data in below(root).items() if name != "more"} == FILES  # the error blocks no file


def test_a_link_is_replaced_and_not_followed(stored, tmp_path, capsys):
    root, outside = tmp_path / "out", tmp_path / "outside"
    root.mkdir()
    outside.write_bytes(b"small")
    (root / "a").symlink_to(outside)
    run(capsys, "materialize", stored, root)
    assert not (root / "a").is_symlink()
    assert outside.read_bytes() == b"small"


def test_a_directory_goes_into_a_store_with_modes_and_times(url, store, tree, tmp_path, capsys):
    (tree / "a").chmod(0o700)
    os.utime(tree / "a", ns=(10**18, 10**18 + 7))
    done = run(capsys, "sync", tree, url)
    total = sum(map(len, FILES.values()))
    assert (done["files"], done["unchanged"], done["deleted"], done["read_bytes"]) == (4, 0, 0, total)
    assert total <= done["new_bytes"] < total + 10_000
    assert in_store(store) == FILES
    assert stat_stored(store, "run/empty").is_directory
    run(capsys, "materialize", url, tmp_path / "back")
    assert below(tmp_path / "back") == FILES
    assert (tmp_path / "back" / "empty").is_dir()
    status = os.stat(tmp_path / "back" / "a")
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o700, 10**18 + 7)
    done = run(capsys, "sync", tmp_path / "back", url)
    assert (done["files"], done["unchanged"]) == (0, 4)


def test_sync_stores_changes_and_deletes_missing_files(url, store, tree, capsys):
    run(capsys, "sync", tree, url)
    (tree / "a").write_bytes(b"longer than before")
    (tree / "zero").unlink()
    (tree / "empty").rmdir()
    done = run(capsys, "sync", tree, url)
    assert (done["files"], done["unchanged"], done["deleted"]) == (1, 2, 0)
    assert "zero" in in_store(store)
    assert run(capsys, "sync", tree, url, "--delete")["deleted"] == 1
    assert in_store(store) == below(tree)
    assert [one.path for one in find(store, "run") if one.is_directory] == ["run/d", "run/d/e"]


def test_a_dry_run_of_sync_changes_nothing(url, store, tree, tell, told):
    tell("sync", tree, url)
    before = in_store(store)
    (tree / "a").write_bytes(b"longer than before")
    (tree / "zero").unlink()
    lines = tell("sync", tree, url, "--delete", "--dry-run").splitlines()
    assert lines == ["would delete zero", "would store a", "would store 1 file, 18 B, delete 1; 2 unchanged"]
    assert told("sync", tree, url, "--delete", "--dry-run")["would"] == ["delete zero", "store a"]
    assert in_store(store) == before


def test_sync_leaves_files_alone_that_are_left_out(url, store, tree, tell):
    tell("sync", tree, url, "--exclude", "zero")
    assert set(in_store(store)) == FILES.keys() - {"zero"}
    (tree / "a").unlink()
    (tree / "d" / "big").unlink()
    shown = tell("sync", tree, url, "--include", "d", "--delete")
    assert shown.splitlines()[-1].endswith("deleted 1; 1 unchanged")
    assert set(in_store(store)) == FILES.keys() - {"zero", "d/big"}


def test_a_time_that_changed_alone_stores_no_bytes(url, store, tree, capsys):
    run(capsys, "sync", tree, url)
    os.utime(tree / "d/big", ns=(10**18, 10**18))
    assert run(capsys, "sync", tree, url)["read_bytes"] == 0
    assert stat_stored(store, "run/d/big").manifest.metadata["posix"]["mtime_ns"] == 10**18
    assert load(store, "run/d/big") == BIG


def test_an_empty_directory_goes_into_a_store(url, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert main(["sync", str(tmp_path / "nothing"), f"{url}/new"]) == 0
    assert main(["materialize", f"{url}/new", str(tmp_path / "back")]) == 0
    assert list((tmp_path / "back").iterdir()) == []


def test_a_directory_in_place_of_a_file_needs_delete(url, store, tree, capsys):
    run(capsys, "sync", tree, url)
    (tree / "a").unlink()
    (tree / "a").mkdir()
    (tree / "a" / "inside").write_bytes(b"x")
    for path in (tree / "d/e/deep é", tree / "d/big"):
        path.unlink()
    (tree / "d/e").rmdir()
    (tree / "d").rmdir()
    (tree / "d").write_bytes(b"a file now")
    assert main(["sync", str(tree), url]) == 2
    assert "--delete" in capsys.readouterr().err
    run(capsys, "sync", tree, url, "--delete")
    assert in_store(store) == below(tree)


def test_a_file_that_tierfs_did_not_write_is_not_deleted(url, tree, tmp_path, capsys):
    run(capsys, "sync", tree, url)
    (tmp_path / "store" / "run").mkdir(exist_ok=True)
    (tmp_path / "store" / "run" / "theirs").write_bytes(b"abc")
    assert main(["sync", str(tree), url, "--delete"]) == 10
    assert "theirs" in capsys.readouterr().err
    assert run(capsys, "materialize", url, tmp_path / "out")["files"] == 5
    assert (tmp_path / "out" / "theirs").read_bytes() == b"abc"
    assert run(capsys, "materialize", url, tmp_path / "out")["unchanged"] == 5


def test_a_file_that_changes_while_it_is_stored_is_stored_again(url, store, tree, capsys, monkeypatch):
    real, left = Writer.commit, [2]

    def commit(self, *arguments, **options):
        found = real(self, *arguments, **options)
        if left[0]:
            left[0] -= 1
            (tree / "a").write_bytes(b"changed" * (3 - left[0]))
        return found

    monkeypatch.setattr(Writer, "commit", commit)
    for name in ("zero", "d/big", "d/e/deep é"):
        (tree / name).unlink()
    run(capsys, "sync", tree, url)
    assert left == [0]
    assert in_store(store) == below(tree)


def test_a_file_that_never_stands_still_is_an_error(url, tree, capsys, monkeypatch):
    real = Writer.commit

    def commit(self, *arguments, **options):
        found = real(self, *arguments, **options)
        with open(tree / "a", "ab") as file:
            file.write(b"x")
        return found

    monkeypatch.setattr(Writer, "commit", commit)
    for name in ("zero", "d/big", "d/e/deep é"):
        (tree / name).unlink()
    assert main(["sync", str(tree), url]) == 8
    assert "changed during each attempt" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["materialize", "{url}/a", "{tmp}/out"], ["sync", "{tmp}/tree/a", "{url}"]])
def test_a_file_is_refused_with_the_command_that_copies_it(stored, tree, tmp_path, words, capsys):
    assert main([word.format(url=stored, tmp=tmp_path) for word in words]) == 2
    assert "tierfs cp" in capsys.readouterr().err


def test_a_missing_source_is_not_found(url, tmp_path, capsys):
    assert main(["materialize", f"{url}/missing", str(tmp_path / "out")]) == 3
    assert main(["sync", str(tmp_path / "missing"), url]) == 3
    assert "does not exist" in capsys.readouterr().err
