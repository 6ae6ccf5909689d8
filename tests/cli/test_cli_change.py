"""``mv`` and ``rm``."""

import json
import random

import fsspec
import pytest

import tierfs
from tierfs.cli import main
from tierfs.errors import StoreError
from tierfs.format import keys
from tierfs.session import open_store, parse_url
from tierfs.store import Writer, delete, make_directory, rename, save
from tierfs.store.status import request_metrics
from tierfs.testing import faults

BIG = random.Random(5).randbytes(200_000)


@pytest.fixture
def url(tmp_path):
    """A store with a directory ``run`` in it."""
    store = tierfs.init(str(tmp_path / "store"))
    for path, content in {"run/a": b"1", "run/b": b"2", "run/deep/big": BIG, "kept/c": b"3"}.items():
        save(store, path, content)
    make_directory(store, "run/empty")
    return f"tierfs::file://{tmp_path}/store"


def names(url):
    """Return every path in the store; directories end with a /."""
    fs, path = fsspec.url_to_fs(url)
    found = fs.find(path, withdirs=True, detail=True)
    return {name[len(path) + 1 :] + "/" * (info["type"] == "directory") for name, info in found.items()} - {"/", ""}


ALL = {"run/", "run/a", "run/b", "run/deep/", "run/deep/big", "run/empty/", "kept/", "kept/c"}


def foreign(tmp_path):
    (tmp_path / "store" / "run" / "deep").mkdir(parents=True)
    (tmp_path / "store" / "run" / "deep" / "foreign").write_bytes(b"not ours")


@pytest.mark.parametrize(
    ("words", "gone", "new"),
    [
        (["run/a", "run/z"], {"run/a"}, {"run/z"}),
        (["run/a", "run/b"], {"run/a"}, set()),
        (["run/a", "kept"], {"run/a"}, {"kept/a"}),
        (["run/a", "new/"], {"run/a"}, {"new/", "new/a"}),
        (["run/a", "run/b", "kept"], {"run/a", "run/b"}, {"kept/a", "kept/b"}),
        (
            ["run", "new"],
            {name for name in ALL if name.startswith("run")},
            {"new/", "new/a", "new/b", "new/deep/", "new/deep/big", "new/empty/"},
        ),
        (["run/deep", "kept"], {"run/deep/", "run/deep/big"}, {"kept/deep/", "kept/deep/big"}),
        (["run/deep", "kept", "-T"], {"run/deep/", "run/deep/big"}, {"kept/big"}),
        (["run/empty", "kept/"], {"run/empty/"}, {"kept/empty/"}),
    ],
)
def test_mv_moves_files_and_directories_without_their_data(url, words, gone, new, monkeypatch, capsys):
    monkeypatch.setattr(Writer, "write", None)
    assert main(["mv", *(word if word == "-T" else f"{url}/{word}" for word in words)]) == 0
    assert capsys.readouterr().out.startswith("moved ")
    assert names(url) == (ALL - gone) | new


def test_mv_takes_bare_urls_and_counts_in_json(url, tmp_path, capsys):
    assert main(["mv", f"file://{tmp_path}/store/run", f"{tmp_path}/store/new", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": 3}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{url}/run", "{url}/run/deep/x"], 2, "into itself"),
        (["{url}/run/a", "{url}/run/a"], 2, "are the same"),
        (["{url}/run/a", "{url}/run/b", "{url}/x"], 2, "end it with /"),
        (["{url}/run/a", "{url}/run/./a", "{url}/kept"], 2, ""),
        (["{url}/run/a", "{url}/run", "{url}/kept"], 2, "twice"),
        (["{url}/run", "{url}/kept/c"], 4, "is a file"),
        (["-T", "{url}/run/a", "{url}/kept"], 4, "is a directory"),
        (["{url}", "{url}/x"], 2, "root of a store"),
        (["-T", "{url}/run/a", "{url}"], 4, "is a directory"),
        (["{url}/run/a", "{other}/a"], 2, "two stores"),
        (["{url}/run/nothing", "{url}/x"], 3, "does not exist"),
    ],
)
def test_mv_refuses_before_anything_is_moved(url, tmp_path, words, code, message, capsys):
    tierfs.init(str(tmp_path / "other"))
    other = f"tierfs::file://{tmp_path}/other"
    assert main(["mv", *(word.format(url=url, other=other) for word in words)]) == code
    assert message in capsys.readouterr().err
    assert names(url) == ALL


def test_mv_and_rm_leave_a_directory_alone_that_holds_a_foreign_file(url, tmp_path, capsys):
    foreign(tmp_path)
    for words in (["mv", f"{url}/run", f"{url}/new"], ["rm", "-r", f"{url}/run"], ["rm", f"{url}/run/deep/foreign"]):
        assert main(words) == 10
        assert "run/deep/foreign was not written by tierfs" in capsys.readouterr().err
    assert names(url) == ALL | {"run/deep/foreign"}


def test_an_interrupted_move_of_a_directory_can_be_finished(url, monkeypatch, capsys):
    def fail(store, source, target):
        if source == "run/b":
            raise StoreError("it broke", path=source)
        rename(store, source, target)

    monkeypatch.setattr("tierfs.cli.commands.changing.rename", fail)
    assert main(["mv", f"{url}/run", f"{url}/new"]) == 8
    monkeypatch.undo()
    assert "run/b" in names(url)
    assert main(["mv", "-T", f"{url}/run", f"{url}/new"]) == 0
    assert names(url) == {"new/", "new/a", "new/b", "new/deep/", "new/deep/big", "new/empty/", "kept/", "kept/c"}
    assert "it broke" in capsys.readouterr().err


def test_rm_deletes_files_and_with_r_directories(url, capsys):
    assert main(["rm", f"{url}/run/a", f"{url}/run/b"]) == 0
    gc = f"`tierfs gc {url.removeprefix('tierfs::')}`"
    assert capsys.readouterr() == (f"deleted 2 files, 2 B; {gc} frees what nothing else needs\n", "")
    assert names(url) == ALL - {"run/a", "run/b"}
    assert main(["rm", "-r", f"{url}/run", f"{url}/run/deep", f"{url}/kept/c", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["files"], done["bytes"]) == (2, len(BIG) + 1)
    assert names(url) == set()


def test_a_dry_run_of_rm_names_what_would_go_and_deletes_nothing(url, tell, told):
    shown = tell("rm", "-r", f"{url}/run", "--dry-run")
    assert shown.count("would delete file://") == 3
    assert shown.splitlines()[-1].startswith("would delete 3 files, ")
    planned = told("rm", "-r", f"{url}/run", "--exclude", "a", "--dry-run")
    assert (planned["files"], planned["bytes"]) == (2, len(BIG) + 1)
    assert names(url) == ALL


def test_a_pattern_names_what_it_matches_unless_it_is_a_name(url, tell, fail):
    fs, path = fsspec.url_to_fs(url)
    fs.pipe_file(f"{path}/run/[ab]", b"4")
    tell("rm", f"{url}/run/[ab]")
    assert names(url) == ALL
    tell("rm", f"{url}/*/[ab]")
    assert names(url) == ALL - {"run/a", "run/b"}
    tell("mv", f"{url}/run/d*", f"{url}/kept/")
    assert "kept/deep/big" in names(url)
    assert fail("rm", f"{url}/run/no*")[0] == 3
    assert fail("rm", f"{url}/k*")[0] == 2  # a directory needs -r


def test_files_that_are_left_out_and_their_directories_stay(url, tell):
    tell("rm", "-r", f"{url}/run", "--include", "deep", "--include", "a")
    assert names(url) == ALL - {"run/a", "run/deep/big", "run/deep/"}
    tell("rm", "-r", url, "--exclude", "kept/*")
    assert names(url) == {"kept/", "kept/c", "run/", "run/empty/"}


@pytest.mark.parametrize(("options", "looking"), [([], 1), (["-r"], 4)])
def test_rm_of_a_file_looks_for_no_directory_to_remove(url, options, looking):
    objects = open_store(parse_url(url))[0].objects

    def requests():
        return sum(counts["requests"] for counts in request_metrics(objects)["object_requests"].values())

    began = requests()
    delete(*open_store(parse_url(f"{url}/run/a")))
    deletion, began = requests() - began, requests()
    assert main(["rm", f"{url}/run/b", *options]) == 0
    assert requests() - began == deletion + looking


def test_rm_with_r_deletes_what_is_a_file_and_a_directory_as_a_whole(url, capsys):
    save(*open_store(parse_url(f"{url}/run/a/below")), b"5")
    assert main(["rm", "-r", f"{url}/run/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 2
    assert names(url) == ALL - {"run/a"}


def test_a_word_behind_two_dashes_is_no_option(url, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path / "store")
    for name in ("-r", "--json"):
        save(open_store(parse_url(url))[0], name, b"named")
    before = names(url)
    assert main(["rm", "--", "-r", "run"]) == 2
    assert "add -r" in capsys.readouterr().err
    assert names(url) == before
    assert main(["cat", "--", "--json"]) == 0
    assert capsys.readouterr().out == "named"
    assert main(["cat", "--", "--missing"]) == 3
    assert main(["ls", "--json", "--", "--missing"]) == 3
    assert main(["mv", "--", "-r", "--json", "kept"]) == 0
    assert names(url) == before - {"-r", "--json"} | {"kept/-r", "kept/--json"}


def test_rm_of_the_root_empties_the_store_and_leaves_it_there(url):
    assert main(["rm", "-r", url]) == 0
    assert names(url) == set()
    assert main(["stat", url]) == 0


def test_rm_deletes_nothing_unless_it_can_delete_all(url, capsys):
    for words, code in ((["{url}/run/a", "{url}/nothing"], 3), (["{url}/run/a", "{url}/run"], 2)):
        assert main(["rm", *(word.format(url=url) for word in words)]) == code
        assert names(url) == ALL
    assert "add -r" in capsys.readouterr().err


@pytest.mark.parametrize("hurt", [faults.truncate, faults.flip_bit])
def test_a_file_whose_record_is_damaged_can_be_removed_or_replaced(url, tmp_path, hurt, capsys):
    store, _ = open_store(parse_url(url))
    (tmp_path / "again").write_bytes(b"again")
    for path in ("run/a", "run/b"):
        hurt(store.objects, keys.record_key(path), 30)
        assert main(["cat", f"{url}/{path}"]) == 6
    assert main(["rm", f"{url}/run/a"]) == 0
    assert main(["cp", str(tmp_path / "again"), f"{url}/run/b"]) == 0
    assert names(url) == ALL - {"run/a"}
    capsys.readouterr()
    assert main(["cat", f"{url}/run/b"]) == 0
    assert capsys.readouterr().out == "again"
    assert main(["verify", url]) == 0


def test_rm_is_content_when_somebody_else_was_faster(url, monkeypatch):
    from tierfs.checkpoint import step_logs

    real = step_logs.delete

    def delete(store, path):
        real(store, path)
        real(store, path)

    monkeypatch.setattr(step_logs, "delete", delete)
    assert main(["rm", "-r", f"{url}/run"]) == 0
    assert names(url) == {"kept/", "kept/c"}
