"""``init``, ``ls``, ``stat``, ``cat``, ``du``: create a store and look at its contents."""

import os
import random
import re
from pathlib import Path

import fsspec
import pytest

import tierfs
from tierfs.cli import main
from tierfs.format.descriptor import Capabilities
from tierfs.objects.backends.local import LocalObjects
from tierfs.session import open_store, parse_url
from tierfs.store import save

RANDOM = random.Random(7)
BIG = RANDOM.randbytes((17 << 20) + 5)
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"


@pytest.fixture
def url(tmp_path):
    """A store with a few files. tierfs did not write one of them, ``foreign``."""
    tierfs.init(str(tmp_path / "store"))
    fs, path = fsspec.url_to_fs(f"tierfs::file://{tmp_path}/store")
    with fs.open(f"{path}/run/big", "wb", metadata={"step": 7, "note": "warm"}) as file:
        file.write(BIG)
    fs.pipe_file(f"{path}/run/copy", BIG)
    fs.pipe_file(f"{path}/run/deep/small", b"small")
    fs.makedirs(f"{path}/run/empty")
    (tmp_path / "store" / "run").mkdir()
    (tmp_path / "store" / "run" / "foreign").write_bytes(b"not ours")
    return f"tierfs::file://{tmp_path}/store"


def test_init_makes_a_store_once_and_finds_it_afterwards(tmp_path, tell, told):
    made = told("init", f"{tmp_path}/new")
    found = told("init", f"tierfs::file://{tmp_path}/new/")
    assert (made.pop("made"), found.pop("made")) == (True, False)
    assert made == found
    assert made["url"] == f"file://{tmp_path}/new"
    assert made["digest"] == "xxh3-128"
    assert (made["cannot_promise"], made["single_writer"], made["host_local"]) == ([], False, True)
    shown = tell("init", f"file://{tmp_path}/new")
    assert re.search(rf"^found +file://{tmp_path}/new$", shown, flags=re.MULTILINE)
    assert made["uuid"] in shown


def test_init_takes_another_digest(tmp_path, told):
    pytest.importorskip("blake3")
    assert told("init", str(tmp_path), "--digest", "blake3")["digest"] == "blake3"


def test_init_says_what_the_endpoint_cannot_promise(tmp_path, tell, monkeypatch, told):
    weak = Capabilities(conditional_create=True, conditional_update=False, list_after_write=False, atomic_put=True)
    monkeypatch.setattr(LocalObjects, "capabilities", property(lambda _: weak))
    missing = ["conditional updates", "list-after-write", "checksums verified by the server"]
    document = told("init", str(tmp_path))
    assert (document["cannot_promise"], document["single_writer"]) == (missing, True)
    shown = tell("init", str(tmp_path))
    assert ", ".join(missing) in shown
    assert "one process at a time" in shown


def test_a_relative_path_is_a_local_one(tmp_path, tell, monkeypatch, told):
    monkeypatch.chdir(tmp_path)
    assert told("init", "here")["url"] == f"file://{tmp_path}/here"
    assert tell("ls", "here") == ""


def test_dots_in_a_local_path_are_resolved(tmp_path, monkeypatch, url, told):
    (tmp_path / "link").symlink_to(tmp_path / "store" / "run")
    for directory, path in [
        ("store", "../store/run"),
        ("store/run", "."),
        ("store/run", "../run/./"),
        ("store/run", f"{tmp_path}/store/deep/../run"),
        ("", "link/../run"),
    ]:
        monkeypatch.chdir(tmp_path / directory)
        assert told("stat", path)["url"] == f"{url}/run"


def test_a_named_store_can_be_used_by_its_name(url, tmp_path, tell, monkeypatch, told):
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.mine]\nurl = "{url.removeprefix("tierfs::")}"\n')
    monkeypatch.setenv("TIERFS_CONFIG", str(config))
    assert tell("ls", "tierfs://mine/run/deep") == "small\n"
    assert told("stat", "tierfs://mine/run/big")["url"] == "tierfs://mine/run/big"


def test_ls_shows_one_name_per_line(url, tell):
    assert tell("ls", f"{url}/run") == "big\ncopy\ndeep/\nempty/\nforeign\n"
    assert tell("ls", f"{url}/run/") == tell("ls", url.removeprefix("tierfs::") + "/run") == tell("ls", f"{url}/run")
    assert tell("ls", f"{url}/run/empty") == ""
    assert tell("ls", f"{url}/run/deep/small") == "small\n"


def test_ls_long_shows_types_sizes_and_times_in_columns(url, tell):
    lines = tell("ls", "-l", f"{url}/run").splitlines()
    assert re.fullmatch(rf"file       17 MiB  {TIME}Z  big", lines[0])
    assert re.fullmatch(r"directory +-  - +deep/", lines[2])
    assert re.fullmatch(rf"foreign       8 B  {TIME}Z  foreign", lines[4])


def test_ls_recursive_shows_everything_below(url, tell):
    below = "run/\nrun/big\nrun/copy\nrun/deep/\nrun/deep/small\nrun/empty/\nrun/foreign\n"
    assert tell("ls", "-R", url) == below
    assert tell("ls", "-R", f"{url}/run/empty") == ""


def test_ls_prints_json(url, told):
    document = told("ls", "-R", f"{url}/run")
    assert document["url"] == f"{url}/run"
    entries = {entry["name"]: entry for entry in document["entries"]}
    assert list(entries) == ["big", "copy", "deep", "deep/small", "empty", "foreign"]
    assert entries["big"]["size"] == len(BIG)
    assert entries["big"]["digest"] == entries["copy"]["digest"]
    assert re.fullmatch(rf"{TIME}\.\d{{6}}Z", entries["big"]["modified"])
    assert (entries["deep"]["type"], entries["deep"]["size"], entries["deep"]["digest"]) == ("directory", 0, None)
    assert [name for name, entry in entries.items() if entry["foreign"]] == ["foreign"]


def test_a_name_cannot_command_the_terminal(url, tell, told):
    store, _ = open_store(parse_url(url))
    save(store, "odd/\x1b[31mred\nline é", b"x")
    assert tell("ls", f"{url}/odd") == "\\x1b[31mred\\nline é\n"
    assert told("ls", f"{url}/odd")["entries"][0]["name"] == "\x1b[31mred\nline é"


def test_stat_shows_a_file_with_its_chunks(url, tell, told):
    document = told("stat", f"{url}/run/big", "--chunks")
    assert (document["type"], document["size"], document["chunks"], document["inline"]) == ("file", len(BIG), 2, False)
    assert document["metadata"] == {"step": 7, "note": "warm"}
    assert document["store"] == url.removeprefix("tierfs::")
    assert [(chunk["offset"], chunk["length"]) for chunk in document["chunk_table"]] == [
        (0, 16 << 20),
        (16 << 20, 1048581),
    ]
    assert document["chunk_bytes"] == sum(chunk["stored_length"] for chunk in document["chunk_table"])
    store, _ = open_store(parse_url(url))
    assert [store.objects.head(chunk["key"]).size for chunk in document["chunk_table"]] == [
        chunk["stored_length"] for chunk in document["chunk_table"]
    ]
    shown = tell("stat", "--chunks", f"{url}/run/big")
    assert f"{len(BIG)} bytes" in shown
    assert '{"note": "warm", "step": 7}' in shown
    assert all(chunk["key"] in shown for chunk in document["chunk_table"])
    assert ".tierfs/chunks" not in tell("stat", f"{url}/run/big")


def test_stat_shows_directories_small_files_and_foreign_ones(url, tell, told):
    assert told("stat", url)["type"] == "directory"
    assert "created" in told("stat", f"{url}/run/empty")
    small = told("stat", f"{url}/run/deep/small", "--chunks")
    assert (small["inline"], small["chunk_table"]) == (True, [])
    foreign = told("stat", f"{url}/run/foreign")
    assert (foreign["foreign"], foreign["size"]) == (True, 8)
    assert re.search(r"^foreign +yes$", tell("stat", f"{url}/run/foreign"), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "start", "stop"),
    [
        ([], 0, None),
        (["--offset", "16MiB"], 16 << 20, None),
        (["--length", "10"], 0, 10),
        (["--offset", "1000", "--length", "16M"], 1000, 16_001_000),
        (["--offset", "1GiB"], 1 << 30, None),
        (["--length", "0"], 0, 0),
        (["--offset", "16MiB", "--length", "1GiB"], 16 << 20, None),
    ],
)
def test_cat_writes_the_bytes_asked_for(url, words, start, stop, capsysbinary, monkeypatch):
    monkeypatch.setattr("tierfs.cli.files.transfer.WINDOW_BYTES", 5_000_000)
    assert main(["cat", f"{url}/run/big", *words]) == 0
    assert capsysbinary.readouterr().out == BIG[start:stop]


def test_cat_reads_a_file_that_tierfs_did_not_write(url, tell):
    assert tell("cat", f"{url}/run/foreign") == "not ours"


def test_du_counts_what_is_held_and_what_is_stored(url, tell, told):
    document = told("du", url)
    assert list(document) == [
        "files", "logical_bytes", "stored_bytes", "shared_bytes", "freed_bytes", "deduplicated_bytes", "chunks",
        "unnamed_files", "unnamed_bytes", "foreign_files", "foreign_bytes", "requests",
    ]  # fmt: skip
    assert (document["files"], document["logical_bytes"]) == (3, 2 * len(BIG) + 5)
    assert (document["deduplicated_bytes"], document["chunks"]) == (len(BIG), 2)
    assert (document["foreign_files"], document["foreign_bytes"]) == (1, 8)
    assert len(BIG) < document["stored_bytes"] < len(BIG) * 1.01
    assert told("du", f"{url}/run/deep/small")["files"] == 1
    shown = tell("du", url)
    assert re.search(rf"^logical bytes +34 MiB +\({document['logical_bytes']}\)$", shown, flags=re.MULTILINE)
    assert re.search(r"^foreign bytes +8 B$", shown, flags=re.MULTILINE)
    assert "requests" not in shown


def test_du_tells_what_is_shared_and_what_deleting_would_free(url, tell, told):
    document = told("du", f"{url}/run/copy")
    assert document["shared_bytes"] > len(BIG)
    assert document["freed_bytes"] == document["stored_bytes"] - document["shared_bytes"] < 1000
    assert set(document["requests"]) <= {"put", "get", "read", "head", "list", "delete", "delete_version"}
    assert all(isinstance(count, int) for count in document["requests"].values())
    assert document["requests"]["read"] >= 1
    tell("rm", f"{url}/run/big")
    document = told("du", f"{url}/run/copy")
    assert (document["shared_bytes"], document["freed_bytes"]) == (0, document["stored_bytes"])
    shown = tell("du", f"{url}/run/copy")
    assert re.search(rf"^freed bytes +17 MiB +\({document['freed_bytes']}\)$", shown, flags=re.MULTILINE)
    assert re.search(r"^shared bytes +0 B$", shown, flags=re.MULTILINE)


def test_a_missing_path_names_the_nearest_directory(url, fail):
    save(open_store(parse_url(url))[0], "run/a", b"content")
    for path, there in (("typo", ""), ("typo/more", ""), ("run/typo/more", "/run"), ("run/a/more", "/run")):
        code, error = fail("ls", f"{url}/{path}")
        assert (code, f"`tierfs ls {url}{there}`" in error["message"]) == (3, True), error


def test_hints_for_a_missing_checkpoint_lead_somewhere(url, fail, tmp_path):
    for words in (("show",), ("verify",), ("export", tmp_path / "out")):
        for place in (f"{url}/typo", f"{url}/typo/latest", f"file://{tmp_path}/none"):
            code, error = fail("checkpoint", words[0], place, *words[1:])
            assert code == 3
            assert "checkpoint ls" not in error["message"]


@pytest.mark.parametrize("url", ["s3:/bucket/run", "s3//bucket/run", "tierfs:s3://bucket/run", "S3://bucket/run"])
def test_nearly_a_url_is_no_local_path(fail, tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    for words in (
        ("ls", url),
        ("init", url),
        ("cp", "a", url),
        ("cp", url, "b"),
        ("sync", ".", url),
        ("mount", url, "."),
    ):
        code, error = fail(*words)
        assert (code, "write tierfs::s3://bucket/run" in error["message"]) == (2, True), error
    assert os.listdir() == ["a"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("user:password", "chmod o="),
        ("user:", "one line USER:PASSWORD"),
        ("user", "one line USER:PASSWORD"),
        ("user:pass word", "without spaces"),
        ("user:pass,word", "without spaces"),
        ("user:password\nmore:more", "one line"),
    ],
)
def test_credentials_that_cannot_be_used_are_refused(url, fail, tmp_path, line, words):
    file = tmp_path / "keys"
    file.write_text(f"{line}\n")
    file.chmod(0o644 if words == "chmod o=" else 0o600)
    code, error = fail("serve", "s3", url, "--credentials", file)
    assert (code, words in error["message"], "password" in error["message"].replace("a password", "")) == (
        2,
        True,
        False,
    )


def test_half_of_the_credentials_is_refused(url, fail, monkeypatch):
    monkeypatch.setenv("TIERFS_SERVE_USER", "user")
    code, error = fail("serve", "s3", url)
    assert (code, "TIERFS_SERVE_PASSWORD" in error["message"]) == (2, True)


@pytest.mark.parametrize("bucket", ["a", "Runs", "a/b", "-runs", "runs=", "x" * 64])
def test_a_name_that_no_bucket_can_have_is_refused(url, fail, bucket):
    code, error = fail("serve", "s3", url, f"--bucket={bucket}")
    assert (code, "--bucket" in error["message"]) == (2, True)
