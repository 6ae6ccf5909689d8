"""Full URLs instead of paths, named stores, options, and fsspec's own entry points."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import subprocess
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import tierfs
from tierfs.cli.files.places import plain_store
from tierfs.errors import InvalidInputError, NotFoundError, StoreNotFoundError
from tierfs.session import init, open_store, parse_url
from tierfs.session.url import strip


@pytest.fixture(params=["tierfs::{protocol}://{path}", "{protocol}://{path}"], ids=["chained", "bare"])
def url_of(request, place):
    """A function that turns a path in the store into a URL, for each form of a URL."""
    return lambda name: request.param.format(protocol=place.protocol, path=place / name if name else place.root)


# -- full URLs in every method -----------------------------------------------------------------------------------


def test_every_looking_method_takes_a_url(place, url_of):
    place.fs.pipe({place / "d/a": b"aa", place / "d/b": b"b"})
    fs, url, path = place.fs, url_of("d"), place / "d"
    for name in "info ls find glob du exists lexists isdir isfile ukey checksum size".split():
        assert getattr(fs, name)(url) == getattr(fs, name)(path), name
    assert list(fs.walk(url)) == list(fs.walk(path))
    assert fs.glob(f"{url}/*") == [f"{path}/a", f"{path}/b"]
    assert fs.created(f"{url}/a") == fs.created(f"{path}/a")
    assert fs.modified(f"{url}/a") == fs.modified(f"{path}/a")
    assert fs.unstrip_protocol(url) == f"{place.url}/d"
    assert fs.sizes([f"{url}/a", f"{url}/b"]) == [2, 1]
    assert fs.expand_path([f"{url}/a", f"{url}/b*"]) == [f"{path}/a", f"{path}/b"]
    assert fs.ls(url_of("")) == fs.ls(place.root)


def test_every_reading_method_takes_a_url(place, url_of, tmp_path):
    place.fs.pipe({place / "a": b"aa", place / "b": b"b"})
    fs, url, other = place.fs, url_of("a"), url_of("b")
    assert fs.cat(url) == fs.cat_file(url) == fs.read_bytes(url) == fs.head(url) == b"aa"
    assert fs.read_text(url) == "aa"
    assert fs.cat([url, other]) == {place / "a": b"aa", place / "b": b"b"}
    assert fs.cat_ranges([url, other], 0, 1) == [b"a", b"b"]
    with fs.open(url) as file:
        assert file.read() == b"aa"
    fs.get(url, str(tmp_path / "one"))
    fs.get([url, other], [str(tmp_path / "1"), str(tmp_path / "2")])
    fs.get_file(other, str(tmp_path / "file"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "one": b"aa", "1": b"aa", "2": b"b", "file": b"b",
    }  # fmt: skip


def test_every_changing_method_takes_a_url(place, url_of, tmp_path):
    (tmp_path / "local").write_bytes(b"local")
    fs, local = place.fs, str(tmp_path / "local")
    fs.pipe(url_of("piped"), b"x")
    fs.pipe({url_of("many/1"): b"1", url_of("many/2"): b"2"})
    fs.pipe_file(url_of("created"), b"x", mode="create")
    fs.put(local, url_of("put"))
    fs.put([local, local], [url_of("puts/1"), url_of("puts/2")])
    fs.put_file(local, url_of("put_file"))
    fs.touch(url_of("touched"))
    fs.cp(url_of("put"), url_of("copied"))
    fs.mv(url_of("piped"), url_of("moved"))
    fs.mkdir(url_of("made"))
    fs.makedirs(url_of("made/more"), exist_ok=True)
    fs.write_text(url_of("text"), "text")
    assert place.names() == sorted(
        ["many/1", "many/2", "created", "put", "puts/1", "puts/2", "put_file", "touched", "copied", "moved", "text"]
    )
    fs.rmdir(url_of("made/more"))
    fs.rm([url_of("many/1"), url_of("many/2")])
    fs.rm(url_of("puts"), recursive=True)
    fs.rm_file(url_of("text"))
    fs.rm(url_of("*put*"))
    assert place.names() == ["copied", "created", "moved", "touched"]


def test_a_url_of_another_filesystem_is_refused(place):
    other = "file" if place.protocol == "memory" else "memory"
    for url in (f"tierfs::{other}:///a", f"{other}:///a"):
        for call in (place.fs.exists, place.fs.cat, place.fs.ls, place.fs.rm, lambda url: place.fs.pipe(url, b"")):
            with pytest.raises(InvalidInputError, match="not on this filesystem"):
                call(url)
    with pytest.raises(InvalidInputError):
        place.fs.mv(place / "a", f"{other}:///a")


@pytest.mark.parametrize(
    "url",
    [
        "tierfs::nothing",
        "tierfs::klingon://bucket/a",
        "tierfs::simplecache::memory://a",
        "tierfs://a::b://c",
        "tierfs::file:///\udcff",
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url):
    with pytest.raises((InvalidInputError, ValueError), match=r"tierfs|klingon"):
        tierfs.TierFileSystem(target_protocol="memory").exists(url)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("tierfs:///tmp/x", "tierfs::file:///tmp/x"),
        ("tierfs:////tmp/x", "tierfs::file:///tmp/x"),
        ("tierfs:/tmp/x", "tierfs::file:///absolute/path"),
        ("tierfs:tmp/x", "tierfs::file:///absolute/path"),
        ("tierfs::/tmp/x", "tierfs::file:///absolute/path"),
    ],
)
def test_a_url_without_a_store_says_what_to_write(url, advice, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        tierfs.TierFileSystem(target_protocol="file").exists,
        tierfs.TierFileSystem().ls,
        parse_url,
        tierfs.init,
    ):
        with pytest.raises(InvalidInputError, match=f"write {advice}"):
            call(url)
    assert os.listdir(tmp_path) == []


NEARLY = {
    "s3:/bucket/run": "tierfs::s3://bucket/run",
    "s3:bucket/run": "tierfs::s3://bucket/run",
    "s3//bucket/run": "tierfs::s3://bucket/run",
    "S3://bucket/run": "tierfs::s3://bucket/run",
    "gs:/bucket": "tierfs::gs://bucket",
    "file:/data/run": "tierfs::file:///data/run",
    "tierfs::s3:/bucket/run": "tierfs::s3://bucket/run",
    "tierfs::s3//bucket/run": "tierfs::s3://bucket/run",
    "tierfs:s3://bucket/run": "tierfs::s3://bucket/run",
}


@pytest.mark.parametrize(("url", "meant"), NEARLY.items(), ids=NEARLY)
def test_nearly_a_url_is_refused_with_the_url(url, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fs = tierfs.TierFileSystem(target_protocol="file", create=True)
    for call in (parse_url, tierfs.init, lambda url: fs.pipe(url, b"x")):
        with pytest.raises(InvalidInputError, match=re.escape(f"write {meant}")):
            call(url)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", ["tierfs::s3:/bucket/run", "tierfs::s3//bucket/run", "tierfs::s3:bucket/run"])
def test_fsspec_makes_no_directory_of_nearly_a_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="write tierfs::s3://bucket/run"), fsspec.open(url, "wb", create=True):
        pass
    assert os.listdir(tmp_path) == []


def test_a_directory_may_be_named_as_a_filesystem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("s3")
    assert parse_url("s3//run").path == f"{tmp_path}/s3/run"
    assert parse_url("./s3:/run").path == f"{tmp_path}/s3:/run"
    assert parse_url("host:/run").path == f"{tmp_path}/host:/run"


@pytest.mark.parametrize("name", ["a?", "a#", "a?b#", "?", "#", "a\nb", "a\tb", "a\rb", "d#/b", "a#b?c"])
def test_names_keep_characters_that_urls_drop(name):
    pytest.importorskip("adlfs")
    path = f"container/run/{name}"
    fs = tierfs.TierFileSystem(target_protocol="abfs")
    for url in (path, f"abfs://{path}", f"tierfs::abfs://container@account.dfs.core.windows.net/run/{name}"):
        assert fs._strip_protocol(url) == path
    assert parse_url(f"tierfs::abfs://{path}").path == path


@pytest.mark.parametrize("name", ["run/a\nb", "run/a?b", "run/a?b#c", "d#/b", "d?/b", "run//a#"])
@pytest.mark.parametrize("protocol", ["ftp", "webhdfs"])
def test_names_in_urls_with_a_host_keep_all_characters(protocol, name):
    location = parse_url(f"{protocol}://host/{name}")
    assert (location.path, dict(location.options)) == (f"/{name}", {"host": "host"})
    assert strip(protocol, f"/{name}") == f"/{name}"


@pytest.mark.parametrize("protocol", ["http", "https"])
def test_a_web_address_has_its_protocol_once(protocol):
    pytest.importorskip("aiohttp")
    address = f"{protocol}://127.0.0.1:9/a/b"
    fs, path = fsspec.url_to_fs(f"tierfs::{address}")
    assert fs.unstrip_protocol(path) == f"tierfs::{address}"
    assert parse_url(f"tierfs::{address}").url == address
    store, path = plain_store(parse_url(address))
    assert (store.url, path) == (f"{protocol}://127.0.0.1:9/a", "b")
    with pytest.raises(StoreNotFoundError, match=rf"[^/]{protocol}://127\.0\.0\.1:9/") as caught:
        fsspec.open(f"tierfs::{address}").open()
    assert f"{protocol}://{protocol}" not in str(caught.value)


def test_pathlib_paths_are_paths(directory_place):
    path = pathlib.Path(directory_place.root) / "a"
    directory_place.fs.pipe_file(path, b"x")
    assert directory_place.fs.cat_file(path) == b"x"
    assert directory_place.fs.cat(path) == b"x"
    assert directory_place.fs.exists(path)
    directory_place.fs.rm(path)
    assert not directory_place.fs.exists(path)


def test_local_is_another_name_of_file(directory_place):
    directory_place.fs.pipe(directory_place / "a", b"x")
    fs, path = fsspec.url_to_fs(f"tierfs::local://{directory_place.root}/a")
    assert fs.cat(path) == b"x"
    assert fs.cat(f"file://{directory_place.root}/a") == b"x"


# -- fsspec's entry points ---------------------------------------------------------------------------------------


def test_two_urls_lead_to_one_instance(place):
    first, path = fsspec.url_to_fs(f"{place.url}/a")
    second, other = fsspec.url_to_fs(f"{place.url}/b/c")
    assert first is second
    assert (path, other) == (place / "a", place / "b/c")


def test_a_mapper_is_a_dictionary_of_files(place):
    mapper = fsspec.get_mapper(f"{place.url}/map")
    assert list(mapper) == []
    mapper["a/b"] = b"1"
    mapper.setitems({"c": b"2", "d": b"3"})
    assert sorted(mapper) == ["a/b", "c", "d"]
    assert (mapper["c"], "a/b" in mapper, "missing" in mapper, len(mapper)) == (b"2", True, False, 3)
    assert mapper.getitems(["a/b", "d", "missing"], on_error="omit") == {"a/b": b"1", "d": b"3"}
    with pytest.raises(KeyError):
        mapper["missing"]
    del mapper["c"]
    mapper.delitems(["d"])
    assert sorted(mapper) == ["a/b"]
    mapper.clear()
    assert list(mapper) == []


def test_a_cache_of_fsspec_may_be_put_in_front(place, tmp_path):
    url = f"simplecache::{place.url}/a"
    options = {"simplecache": {"cache_storage": str(tmp_path)}}
    with fsspec.open(url, "wb", **options) as file:
        file.write(b"through the cache")
    assert place.fs.cat(place / "a") == b"through the cache"
    with fsspec.open(url, "rb", **options) as file:
        assert file.read() == b"through the cache"


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # fsspec leaves the cache's file open
@pytest.mark.parametrize("cache", ["blockcache", "cached"])
def test_a_cache_of_blocks_may_be_put_in_front(place, tmp_path, cache, random_bytes):
    data = random_bytes(3_000_000, 1)
    place.fs.pipe(place / "a", data)
    for _ in range(2):
        opened = fsspec.open(f"{cache}::{place.url}/a", **{cache: {"cache_storage": str(tmp_path)}})
        with opened as file:
            file.seek(7)
            assert file.read() == data[7:]
        assert file.closed
    del file, opened
    gc.collect()


# -- stores: found, missing, created -----------------------------------------------------------------------------


def test_a_store_is_found_by_walking_up(place):
    fs, path = fsspec.url_to_fs(f"{place.url}/far/down/the/tree")
    fs.pipe(path, b"x")
    assert place.names() == ["far/down/the/tree"]


def test_a_write_without_a_store_names_the_init_command(memory_root, tmp_path):
    for fs, root in (("memory", memory_root), ("file", f"{tmp_path}/none")):
        with pytest.raises(StoreNotFoundError, match=f"tierfs init {fs}://{root}/run"):
            fsspec.filesystem("tierfs", target_protocol=fs).pipe(f"{root}/run/a", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "root"),
    [("/top", "/top"), ("/top/step_1", "/top/step_1"), ("/runs/gpt/step_1", "/runs/gpt")],
    ids=["a bucket", "a run", "a step of a run"],
)
def test_no_bucket_is_proposed_for_a_store_unless_it_was_named(path, root):
    with pytest.raises(StoreNotFoundError, match=f"tierfs init memory://{root}$"):
        open_store(parse_url(f"tierfs::memory://{path}"), write=True)
    with pytest.raises(StoreNotFoundError, match=f"tierfs init memory://{path}$"):
        open_store(parse_url(f"tierfs::memory://{path}"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("ACK", "objct"), ("TIMEOUT", "soon"), ("BANDWIDTH", "fast"), ("CODECS", "zip"), ("PEERS", "all")],
)
def test_each_setting_is_read_from_the_environment(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(f"TIERFS_{name}", value)
    with pytest.raises(InvalidInputError, match=value):
        init(str(tmp_path))


LOOKUPS = {
    "exists": lambda fs, path: fs.exists(path) or [],
    "isdir": lambda fs, path: fs.isdir(path) or [],
    "find": lambda fs, path: fs.find(path),
    "glob": lambda fs, path: fs.glob(f"{path}/*"),
    "walk": lambda fs, path: list(fs.walk(path)),
    "du": lambda fs, path: fs.du(path) or [],
}


@pytest.mark.parametrize("look", LOOKUPS.values(), ids=LOOKUPS)
def test_a_look_up_without_a_store_warns_once(memory_root, caplog, look):
    fs = fsspec.filesystem("tierfs", target_protocol="memory")
    for name in ("a", "b"):
        assert look(fs, f"{memory_root}/{name}") == []
    (record,) = caplog.records
    assert "tierfs init" in record.getMessage()
    with pytest.raises(NotFoundError):
        fs.cat(f"{memory_root}/a")
    caplog.clear()
    assert look(fsspec.filesystem("tierfs", target_protocol="memory", create=True), f"{memory_root}/x/a") == []
    assert not caplog.records


def test_a_store_may_lie_at_the_root_of_the_memory_filesystem():
    code = """
import fsspec, tierfs
tierfs.init("memory://")
fs, root = fsspec.url_to_fs("tierfs::memory://")
fs.pipe("/run/a", b"x")
assert fs.isdir(root) and fs.exists("/")
assert fs.ls(root, detail=False) == fs.ls("tierfs::memory://", detail=False) == ["/run"]
assert fs.find(root) == fs.glob("*/*") == ["/run/a"]
assert [top for top, _, _ in fs.walk(root)] == ["", "/run"]
fs.rm("/run", recursive=True)
assert fs.ls("/") == []
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("wish", [True, "true", "1", 1, "yes"])
def test_the_option_create_makes_a_store_at_the_first_write(memory_root, wish):
    fs, path = fsspec.url_to_fs(f"tierfs::memory://{memory_root}/run/a", create=wish)
    assert not fs.exists(path)
    assert not [key for key in MemoryFileSystem.store if key.startswith(memory_root)]
    fs.pipe(path, b"x")
    assert f"{memory_root}/run/.tierfs/store.json" in MemoryFileSystem.store
    assert fsspec.filesystem("tierfs", target_protocol="memory").cat(path) == b"x"


@pytest.mark.parametrize("wish", [False, "false", "0", "no"])
def test_the_option_create_comes_before_the_environment(memory_root, monkeypatch, wish):
    monkeypatch.setenv("TIERFS_CREATE", "1")
    with pytest.raises(StoreNotFoundError):
        tierfs.TierFileSystem(target_protocol="memory", create=wish).pipe(f"{memory_root}/a", b"x")


def test_the_environment_is_read_at_each_write(memory_root, monkeypatch):
    fs = fsspec.filesystem("tierfs", target_protocol="memory")
    with pytest.raises(StoreNotFoundError):
        fs.pipe(f"{memory_root}/a", b"x")
    monkeypatch.setenv("TIERFS_CREATE", "1")
    fs.pipe(f"{memory_root}/a", b"x")
    assert fs.cat(f"{memory_root}/a") == b"x"


def test_a_write_creates_no_store_inside_another(place, monkeypatch):
    monkeypatch.setenv("TIERFS_CREATE", "1")
    place.fs.pipe(place / "run/a", b"x")
    assert place.names() == ["run/a"]
    with pytest.raises(InvalidInputError, match="inside"):
        init(f"{place.bare}/run")


HINTS = {
    "default_cache": "none",
    "fill_cache": False,
    "default_block_size": 5,
    "cache_options": {},
    "precache_options": {},
    "cache_type": "readahead",
    "block_size": 5,
    "size": 1,
    "buffering": 0,
    "max_gap": 5,
    "prefetch": True,
    "max_concurrency": 3,
    "blocksize": 5,
    "readahead": 0,
}


def test_hints_that_tierfs_does_not_know_are_passed_over(place):
    with place.fs.open(place / "a", "wb", **HINTS) as file:
        file.write(b"x")
    with place.fs.open(place / "a", "r", **HINTS) as file:
        assert file.read() == "x"
    place.fs.pipe_file(place / "b", b"x", **HINTS)
    assert place.fs.cat(place / "b", **HINTS) == b"x"
    with fsspec.open(f"{place.url}/a", **HINTS) as file:
        assert file.read() == b"x"


@pytest.mark.parametrize("name", ["colour", "acks", "encoding"])
def test_an_unknown_option_of_a_write_is_refused(place, name, tmp_path):
    (tmp_path / "local").write_bytes(b"x")
    for write in (
        lambda **options: place.fs.open(place / "a", "wb", **options),
        lambda **options: place.fs.pipe_file(place / "a", b"x", **options),
        lambda **options: place.fs.put_file(str(tmp_path / "local"), place / "a", **options),
        lambda **options: place.fs.touch(place / "a", **options),
    ):
        with pytest.raises(InvalidInputError, match=name):
            write(**{name: "object"})
    assert place.names() == []


def test_user_metadata_can_be_given_to_every_write(place, tmp_path):
    (tmp_path / "local").write_bytes(b"x")
    place.fs.pipe_file(place / "piped", b"x", metadata={"step": 1}, ack="object")
    place.fs.put_file(str(tmp_path / "local"), place / "put", metadata={"step": 1}, ack="object")
    assert [place.fs.info(place / name)["metadata"] for name in ("piped", "put")] == [{"step": 1}] * 2
    with pytest.raises(InvalidInputError, match="level"):
        place.fs.pipe_file(place / "piped", b"x", ack="sometime")


@pytest.mark.parametrize("options", [{"colour": "red"}, {"create": "maybe"}])
def test_an_option_that_tierfs_does_not_know_is_refused(options):
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        fsspec.filesystem("tierfs", target_protocol="memory", **options)


def test_an_object_tier_that_fsspec_does_not_know_is_refused():
    with pytest.raises(InvalidInputError, match="klingon"):
        fsspec.filesystem("tierfs", target_protocol="klingon")


# -- named stores ------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A function that writes the configuration file."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("TIERFS_CONFIG", str(path))
    return path.write_text


@pytest.fixture
def named(place, config):
    config(f'[stores.ml]\nurl = "{place.bare}"\n')
    return fsspec.filesystem("tierfs")


def test_a_named_store_is_opened_by_its_name(place, named):
    with fsspec.open("tierfs://ml/run/a", "w") as file:
        file.write("named")
    assert place.fs.cat(place / "run/a") == b"named"
    with fsspec.open("tierfs://ml/run/a") as file:
        assert file.read() == b"named"
        assert file.full_name == "tierfs://ml/run/a"


def test_names_in_a_named_store_begin_with_its_name(named):
    named.pipe({"ml/a": b"x", "ml/d/b": b"x"})
    assert named.ls("ml", detail=False) == named.ls("tierfs://ml/", detail=False) == ["ml/a", "ml/d"]
    assert named.find("ml", withdirs=True) == ["ml", "ml/a", "ml/d", "ml/d/b"]
    assert named.glob("ml/*/b") == ["ml/d/b"]
    assert named.info("ml")["name"] == "ml"
    assert named.info("tierfs://ml/d/b")["name"] == "ml/d/b"
    assert list(named.walk("ml/d")) == [("ml/d", [], ["b"])]
    assert named.unstrip_protocol("ml/a") == "tierfs://ml/a"


def test_a_named_store_may_be_a_directory_deep_in_one(place, config):
    config(f'[stores.deep]\nurl = "{place.bare}/team/some/where/runs"\n')
    fs = fsspec.filesystem("tierfs")
    fs.pipe({"deep/a": b"x", "deep/d/b": b"x"})
    assert place.names() == ["team/some/where/runs/a", "team/some/where/runs/d/b"]
    assert fs.ls("deep", detail=False) == ["deep/a", "deep/d"]
    assert fs.find("deep/d") == ["deep/d/b"]
    assert fs.find("deep") == ["deep/a", "deep/d/b"]
    assert fs.glob("deep/**") == ["deep", "deep/a", "deep/d", "deep/d/b"]
    fs.mv("deep/d", "deep/e")
    assert fs.cat("deep/e/b") == b"x"


def test_create_in_the_configuration_makes_the_store_at_its_url(config, memory_root):
    config(f'[stores.new]\nurl = "memory://{memory_root}/team"\ncreate = true\n')
    fs = fsspec.filesystem("tierfs")
    assert not fs.exists("new/run/a")
    fs.pipe("new/run/a", b"x")
    assert f"{memory_root}/team/.tierfs/store.json" in MemoryFileSystem.store
    assert fs.ls("new", detail=False) == ["new/run"]


def test_a_missing_configuration_that_was_named_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TIERFS_CONFIG", str(tmp_path / "cofnig.toml"))
    init(str(tmp_path / "store"))
    assert "cofnig.toml is missing (TIERFS_CONFIG)" in caplog.text


def test_a_missing_named_store_names_the_init_command(config, memory_root):
    config(f'[stores.new]\nurl = "memory://{memory_root}/team"\n')
    with pytest.raises(StoreNotFoundError, match=f"tierfs init memory://{memory_root}/team"):
        fsspec.filesystem("tierfs").pipe("new/run/a", b"x")


def test_the_environment_comes_before_the_configuration(config, memory_root, monkeypatch):
    config(f'[stores.new]\nurl = "memory://{memory_root}/team"\ncreate = true\n')
    monkeypatch.setenv("TIERFS_CREATE", "0")
    with pytest.raises(StoreNotFoundError):
        fsspec.filesystem("tierfs").pipe("new/run/a", b"x")


@pytest.mark.parametrize(
    "text", [None, "", "[stores.other]\nurl = 'memory://x'\n"], ids=["no file", "empty", "another"]
)
def test_an_unknown_name_names_the_file_to_edit(config, tmp_path, text):
    if text is not None:
        config(text)
    with pytest.raises(InvalidInputError, match=r"'ml'") as caught:
        fsspec.filesystem("tierfs").exists("ml/a")
    assert str(tmp_path / "config.toml") in str(caught.value)
    assert "[stores.ml]" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[stores.ml\n", "cannot be read"),
        ("[stores.ml]\nurl = 'memory://x'\n[tier]\nack = 'local'\n", "unknown table 'tier'"),
        ("ack = 'local'\n[stores.ml]\nurl = 'memory://x'\n", "unknown table 'ack'"),
        ("stores = 3\n", "no store is named"),
        ("[stores]\nml = 3\n", "no store is named"),
        ("[stores.ml]\nurl = 3\n", "no store is named"),
        ("[stores.ml]\nurl = 'memory://x'\ncolour = 'red'\n", "colour"),
        ("[stores.ml]\nurl = 'memory://x'\ncreate = 'yes'\n", "create"),
        ("[stores.ml]\nurl = 'memory://x'\noptions = 'none'\n", "options"),
        ("[stores.ml]\nurl = 'tierfs://ml'\n", "own"),
        ("[stores.ml]\nurl = 'klingon://x'\n", "klingon"),
    ],
)
def test_an_invalid_configuration_is_named_in_the_error(config, tmp_path, text, problem):
    config(text)
    with pytest.raises(InvalidInputError, match=problem) as caught:
        fsspec.filesystem("tierfs").exists("ml/a")
    assert str(tmp_path / "config.toml") in str(caught.value) or problem == "klingon"


@pytest.mark.parametrize("name", ["-x", "a b", "ä", "x" * 65])
def test_a_name_that_no_store_can_have_is_refused(named, name):
    with pytest.raises(InvalidInputError, match="not the name of a store"):
        named.exists(f"{name}/a")


def test_above_every_named_store_nothing_is_there(named):
    assert not named.exists("")
    assert named.find("tierfs://") == []


# -- secrets -----------------------------------------------------------------------------------------------------

SECRET = "hunter2-very-secret"


def test_secrets_in_options_are_shown_by_no_repr_and_no_error(place, monkeypatch):
    fs = tierfs.TierFileSystem(
        target_protocol=place.protocol, target_options={"key": SECRET, "secret": SECRET}, skip_instance_cache=True
    )
    fs.pipe(place / "a", b"x")
    store = fs._locate(place / "a")[0]
    shown = [repr(store), repr(store.objects), repr(store.lease_cache), repr(store.records), repr(fs), str(fs)]
    for call in (
        lambda: fs.cat(place / "missing"),
        lambda: fs.cat("klingon://a"),
        lambda: fs.pipe(place / "../a", b""),
        lambda: fs.open(place / "a", "xb"),
        lambda: (
            fs.pipe(f"{os.path.dirname(place.root)}/elsewhere/a", b"")
            if place.protocol == "file"
            else fs.pipe("/x", b"")
        ),
    ):
        with pytest.raises((OSError, ValueError)) as caught:
            call()
        shown.append(str(caught.value) + repr(caught.value))
    assert not [text for text in shown if SECRET in text]


@pytest.mark.parametrize("text", ["store/run", "./store/run", "tierfs::file://store/run"])
def test_a_relative_path_follows_the_working_directory(tmp_path, monkeypatch, text):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert parse_url(text).path == f"{tmp_path}/{name}/store/run"
