"""``cp``: into a store, out of it, within it and between stores."""

import contextlib
import functools
import io
import itertools
import json
import os
import random
import re
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.waiting import HANG_S

import tierfs
from tierfs.cli import main
from tierfs.cli.files.transfer import FILES_AT_ONCE, Stopped, run_in_parallel
from tierfs.errors import StoreError
from tierfs.session import open_store, parse_url
from tierfs.store import Writer, delete, save
from tierfs.testing import faults

ROOT = Path(__file__).parents[2]
RANDOM = random.Random(11)
FILES = {
    "zero": b"",
    "small": b"small",
    "a/big": RANDOM.randbytes((16 << 20) + 77),
    "a/b/deep é": RANDOM.randbytes(100_000),
    "a/b/.hidden": b"hidden",
}
TOTAL = sum(map(len, FILES.values()))


@pytest.fixture
def tree(tmp_path):
    """A local directory of files and one empty directory."""
    for name, content in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "tree" / "empty" / "inner").mkdir(parents=True)
    return tmp_path / "tree"


def below(directory):
    """Return the content of every file below a local directory, by relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def stored(url):
    """Return the content of every file below a URL, by relative path."""
    fs, path = fsspec.url_to_fs(url)
    return {name[len(path) + 1 :]: fs.cat_file(name) for name in fs.find(path)}


def put(url, content):
    save(*open_store(parse_url(url)), content)


def test_a_directory_goes_into_a_store_and_comes_back(url, tree, tmp_path, capsys):
    assert main(["cp", "-r", str(tree), f"{url}/run", "--json"]) == 0
    shown = capsys.readouterr()
    done = json.loads(shown.out)
    assert (done["files"], done["bytes"]) == (len(FILES), TOTAL)
    assert TOTAL <= done["new_bytes"] < TOTAL + 10_000
    assert shown.err == ""
    assert stored(f"{url}/run") == FILES
    assert main(["cp", f"{url}/run", "-r", str(tmp_path / "back")]) == 0
    assert capsys.readouterr() == ("copied 5 files, 16.1 MiB\n", "")
    assert below(tmp_path / "back") == FILES
    assert (tmp_path / "back" / "empty" / "inner").is_dir()


def test_bytes_that_the_store_has_are_not_new(url, tree, tell, told):
    tell("cp", "-r", tree, f"{url}/run")
    assert told("cp", "-r", tree, f"{url}/again")["new_bytes"] < 10_000
    assert "(0 B new)" not in tell("cp", "-r", f"{url}/run", f"{url}/third")
    assert stored(f"{url}/third") == FILES


def test_a_dry_run_names_each_copy_and_copies_nothing(url, tree, tell, told):
    shown = tell("cp", "-r", tree, f"{url}/run", "--dry-run").splitlines()
    assert f"would copy {tree}/a/big -> {url}/run/a/big" in shown
    assert shown[-1] == "would copy 5 files, 16.1 MiB"
    planned = told("cp", "-r", tree, f"{url}/run", "--dry-run", "--exclude", ".*", "--include", "a")
    assert [each["source"] for each in planned["would_copy"]] == [f"{tree}/a/b/deep é", f"{tree}/a/big"]
    assert stored(url) == {}


def test_only_chosen_files_are_copied(url, tree, tmp_path, tell):
    tell("cp", "-r", tree, f"{url}/run", "--exclude", "b", "--exclude", "zero")
    assert set(stored(f"{url}/run")) == {"small", "a/big"}
    tell("cp", f"{url}/run/s*", f"{url}/run/a/b*", tmp_path)
    assert (tmp_path / "small").read_bytes() == b"small"
    assert (tmp_path / "big").exists()


def test_progress_is_shown_on_stderr_when_it_is_asked_for(url, tree, tmp_path, capsys):
    for words in (["-r", str(tree), f"{url}/run"], ["-r", f"{url}/run", str(tmp_path / "back")]):
        assert main(["cp", "--progress", *words]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("copied 5 files, 16.1 MiB")
        assert "100%" in shown.err
        assert "16.1 MiB/16.1 MiB" in shown.err
        assert re.search(r"[KMG]iB/s, 0:00:0", shown.err)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{tree}/small", "{url}/new"], {"new"}),
        (["{tree}/small", "{url}/new/"], {"new/small"}),
        (["{tree}/small", "{url}"], {"small"}),
        (["{tree}/small", "{url}/there"], {"there/small"}),
        (["{tree}/small", "-T", "{url}/there/file"], set()),
        (["{tree}/small", "{tree}/zero", "{url}/new/"], {"new/small", "new/zero"}),
        (["{tree}/small", "-r", "{tree}/a/b", "{url}/there"], {"there/small", "there/b/deep é", "there/b/.hidden"}),
        (["-r", "{tree}/a/b", "{url}/there"], {"there/b/deep é", "there/b/.hidden"}),
        (["-r", "{tree}/a/b/", "{url}/there/"], {"there/b/deep é", "there/b/.hidden"}),
        (["-rT", "{tree}/a/b", "{url}/there"], {"there/deep é", "there/.hidden"}),
        (["-r", "{tree}/a/b/.", "{url}/there"], {"there/deep é", "there/.hidden"}),
        (["-r", "{tree}/a/b", "{url}/new"], {"new/deep é", "new/.hidden"}),
    ],
)
def test_the_target_is_a_new_name_or_a_directory_as_for_cp(url, tree, words, expected):
    put(f"{url}/there/file", b"old")
    assert main(["cp", *(word.format(url=url, tree=tree) for word in words)]) == 0
    assert set(stored(url)) == expected | {"there/file"}


def test_the_same_rules_hold_for_a_local_target(url, tmp_path):
    put(f"{url}/d/file", b"1")
    (tmp_path / "there").mkdir()
    for target in ("there", "new/", "name"):
        assert main(["cp", f"{url}/d/file", f"{tmp_path}/{target}"]) == 0
    assert main(["cp", "-r", f"{url}/d", f"{tmp_path}/there"]) == 0
    assert {"there/file", "new/file", "name", "there/d/file"} <= set(below(tmp_path))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{tree}", "{url}/x"], 2, "add -r"),
        (["{tree}/small", "{tree}/zero", "{url}/x"], 2, "end it with /"),
        (["{tree}/small", "{tree}/zero", "{url}/there/file"], 2, "end it with /"),
        (["-r", "{tree}/a", "{url}/there/file"], 4, "is a file"),
        (["{tree}/small", "{url}/there/file/"], 4, "is a file"),
        (["-T", "{tree}/small", "{url}/there"], 4, "is a directory"),
        (["-T", "{tree}/small", "{url}"], 4, "is a directory"),
        (["{tree}/small", "{tree}/./small", "{url}/new/"], 2, "two sources"),
        (["-r", "{url}/there", "{url}/there/x"], 2, "into itself"),
        (["-r", "{url}", "{url}/x"], 2, "into itself"),
        (["{url}/there/file", "{url}/there/file"], 2, "are the same"),
        (["{tree}/small", "{tree}/x"], 2, "starts with tierfs::"),
        (["s3://bucket/x", "{url}/x"], 2, "tierfs::s3://bucket/x"),
        (["simplecache::s3://bucket/x", "{url}/x"], 2, "not a local path"),
        (["{tree}/small", "{url}/.tierfs/x"], 2, ".tierfs"),
        (["-", "-"], 2, "stdin"),
        (["-", "{tree}/small", "{url}/"], 2, "one SOURCE"),
        (["-", "{url}/there"], 2, "is a directory"),
        (["{url}/there", "-"], 2, "is a directory"),
        (["{url}/there/file", "-", "--json"], 2, "--json"),
        (["{url}/there/file", "{tree}/a/b/deep é/x"], 2, "deep é"),
    ],
)
def test_an_invalid_copy_is_refused_before_any_write(url, tree, words, code, message, capsys):
    put(f"{url}/there/file", b"old")
    before = stored(url), below(tree)
    assert main(["cp", *(word.format(url=url, tree=tree) for word in words)]) == code
    assert message in capsys.readouterr().err
    assert (stored(url), below(tree)) == before


def test_a_file_and_a_directory_of_one_name_are_found_before_anything_is_written(url, tree, capsys):
    put(f"{url}/run/a", b"a file")
    assert main(["cp", "-rT", str(tree), f"{url}/run"]) == 4
    assert f"{url}/run/a is a file" in capsys.readouterr().err
    assert stored(f"{url}/run") == {"a": b"a file"}


@pytest.mark.parametrize(
    "words",
    [
        ["cp", "{tree}/zero", "{url}/file/new"],
        ["cp", "-r", "{tree}/a", "{url}/file/new/"],
        ["cp", "-", "{url}/file/new"],
        ["cp", "{url}/other", "{url}/file/deep/new"],
        ["mv", "{url}/other", "{url}/file/new"],
        ["mv", "{url}/file", "{url}/file/new"],
        ["sync", "{tree}", "{url}/file/new"],
    ],
)
def test_no_command_puts_a_file_below_a_file(url, tree, capsys, words):
    put(f"{url}/file", b"file")
    put(f"{url}/other", b"other")
    assert main([word.format(url=url, tree=tree) for word in words]) == 4
    assert "/file is a file" in capsys.readouterr().err
    assert stored(url) == {"file": b"file", "other": b"other"}


def test_within_a_store_only_the_manifest_is_copied(url, tree, monkeypatch):
    put(f"{url}/a/big", FILES["a/big"])
    monkeypatch.setattr(Writer, "write", None)
    assert main(["cp", "-r", f"{url}/a", f"{url}/b"]) == 0
    assert stored(f"{url}/b") == {"big": FILES["a/big"]}


def test_between_stores_bytes_metadata_and_empty_directories_are_copied(url, tmp_path):
    tierfs.init(str(tmp_path / "other"))
    fs, path = fsspec.url_to_fs(url)
    with fs.open(f"{path}/run/big", "wb", metadata={"step": 3}) as file:
        file.write(FILES["a/big"])
    fs.makedirs(f"{path}/run/empty")
    target = f"tierfs::file://{tmp_path}/other/run"
    assert main(["cp", "-r", f"{url}/run", target]) == 0
    assert stored(target) == {"big": FILES["a/big"]}
    assert fs.info(f"{tmp_path}/other/run/big")["metadata"] == {"step": 3}
    assert fs.isdir(f"{tmp_path}/other/run/empty")


def test_a_store_is_made_where_the_environment_asks_for_it(tmp_path, tree, monkeypatch, capsys):
    target = f"tierfs::file://{tmp_path}/fresh/run/small"
    assert main(["cp", str(tree / "small"), target]) == 3
    assert "tierfs init" in capsys.readouterr().err
    monkeypatch.setenv("TIERFS_CREATE", "1")
    assert main(["cp", str(tree / "small"), target]) == 0
    assert stored(f"tierfs::file://{tmp_path}/fresh/run") == {"small": b"small"}


def test_a_stream_goes_in_and_out(url, capsysbinary, monkeypatch):
    content = FILES["a/big"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["cp", "-", f"{url}/stream"]) == 0
    capsysbinary.readouterr()
    assert main(["cp", f"{url}/stream", "-"]) == 0
    assert capsysbinary.readouterr().out == content


def test_a_pipe_that_does_not_block_is_read_to_its_end(url, monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.write(writing, b"first, ")

    def write():
        for piece in (b"second, ", b"last"):
            time.sleep(0.3)
            os.write(writing, piece)
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    with open(reading, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["cp", "-", f"{url}/in"]) == 0
    writer.join()
    assert stored(url) == {"in": b"first, second, last"}


def test_a_pipe_is_copied_when_it_is_named(url):
    script = f"{sys.executable} -m tierfs.cli cp <(echo piped) {url}/pipe"
    subprocess.run(["bash", "-c", script], cwd=ROOT, check=True)
    assert stored(url) == {"pipe": b"piped\n"}


def test_a_pipe_in_a_directory_is_refused_rather_than_waited_for(url, tree, capsys):
    os.mkfifo(tree / "pipe")
    assert main(["cp", "-r", str(tree), f"{url}/run"]) == 2
    assert f"{tree}/pipe is a pipe" in capsys.readouterr().err
    assert stored(url) == {}


def test_links_are_followed_and_loops_are_found(url, tree, capsys):
    (tree / "link").symlink_to("a/b")
    assert main(["cp", "-r", str(tree), f"{url}/run"]) == 0
    assert stored(f"{url}/run/link") == {"deep é": FILES["a/b/deep é"], ".hidden": b"hidden"}
    (tree / "a" / "loop").symlink_to("..")
    assert main(["cp", "-r", str(tree), f"{url}/again"]) == 2
    assert "a/loop is a link back" in capsys.readouterr().err


def test_a_link_and_a_device_as_local_target_stay_what_they_are(url, tmp_path):
    put(f"{url}/file", b"new")
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    assert main(["cp", f"{url}/file", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    assert main(["cp", f"{url}/file", "/dev/null"]) == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_new_local_file_has_the_usual_rights(url, tmp_path):
    put(f"{url}/file", b"new")
    (tmp_path / "usual").touch()
    assert main(["cp", f"{url}/file", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_damaged_file_leaves_the_local_target_as_it_was(url, tmp_path, capsys):
    put(f"{url}/big", FILES["a/big"])
    store, _ = open_store(parse_url(url))
    assert main(["stat", "--chunks", f"{url}/big", "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["chunk_table"][1]["key"]
    faults.truncate(store.objects, key, 100)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "big").write_bytes(b"old")
    assert main(["cp", f"{url}/big", str(tmp_path / "out")]) == 6
    shown = capsys.readouterr().err
    assert f"{store.url}/big" in shown
    assert key in shown
    assert "tierfs verify" in shown
    assert below(tmp_path / "out") == {"big": b"old"}


def test_a_failing_upload_publishes_nothing_and_stops_the_others(url, tmp_path, monkeypatch, capsys):
    (tmp_path / "many").mkdir()
    for number in range(50):
        (tmp_path / "many" / f"{number:02}").write_bytes(b"x" * 70_000)
    real = Writer.commit

    def commit(self):
        if self.path.endswith("05"):
            raise StoreError("out of order", path=self.path)
        return real(self)

    monkeypatch.setattr(Writer, "commit", commit)
    assert main(["cp", "-r", str(tmp_path / "many"), f"{url}/many"]) == 8
    assert "out of order" in capsys.readouterr().err
    assert "05" not in stored(f"{url}/many")
    assert len(stored(f"{url}/many")) < 49


class Busy(MemoryFileSystem):
    """A filesystem that calls ``strike`` once, within the given request for records below ``run/``."""

    protocol = "busy"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    waits, strike = -1, staticmethod(lambda: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("busy://"))

    @classmethod
    def _meet(cls, path):
        if "/tree/run/" in path:
            cls.waits -= 1
            if cls.waits == 0:
                cls.strike()

    def cat_file(self, path, *args, **options):
        self._meet(path)
        return super().cat_file(path, *args, **options)

    def info(self, path, **options):
        self._meet(path)
        return super().info(path, **options)

    def ls(self, path, *args, **options):
        found = super().ls(path, *args, **options)
        self._meet(f"{path}/")
        return found


@pytest.mark.parametrize("command", ["cp", "cp within", "materialize"])
def test_a_checkpoint_that_is_saved_again_meanwhile_is_copied_whole_or_not(tmp_path, command, monkeypatch, capsys):
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "0")  # another host saves
    fsspec.register_implementation("busy", Busy, clobber=True)
    url = f"tierfs::busy:///bucket/{command.replace(' ', '')}"
    tierfs.init(url)
    numbers = itertools.count()

    def write(step):
        number = next(numbers)
        put(f"{url}/run/{step}/rank-00000-{number:08x}.safetensors", b"data")
        put(f"{url}/run/{step}/.metadata", b"%08x" % number)
        for old in range(number):
            with contextlib.suppress(FileNotFoundError):
                delete(*open_store(parse_url(f"{url}/run/{step}/rank-00000-{old:08x}.safetensors")))

    codes = Counter()
    for waits in itertools.count(1):
        step, target = f"step_{waits}", f"{url}/kept" if "within" in command else str(tmp_path / "kept")
        write(step)
        Busy.waits, Busy.strike = waits, functools.partial(write, step)
        words = ["materialize"] if command == "materialize" else ["cp", "-r"]
        code = main([*words, f"{url}/run/{step}", f"{target}/{step}"])
        is_struck, Busy.waits = Busy.waits <= 0, -1
        codes[code] += 1
        found = below(tmp_path / "kept" / step) if "within" not in command else stored(f"{target}/{step}")
        if code == 0:
            assert f"rank-00000-{found['.metadata'].decode()}.safetensors" in found, f"at request {waits}"
        if not is_struck:
            break
    assert set(codes) <= {0, 3, 5}, capsys.readouterr().err
    assert codes[0] > codes.total() / 2


def test_several_tasks_run_at_once_and_the_first_error_ends_all():
    meeting = threading.Barrier(FILES_AT_ONCE, timeout=HANG_S)
    run_in_parallel(lambda _item, _stop: meeting.wait(), range(FILES_AT_ONCE))

    ended = []

    def task(item, stop):
        if item == 1:
            raise ValueError("first")
        stop.wait(HANG_S)
        ended.append(item)
        raise Stopped

    with pytest.raises(ValueError, match="first"):
        run_in_parallel(task, range(100))
    assert len(ended) < FILES_AT_ONCE
