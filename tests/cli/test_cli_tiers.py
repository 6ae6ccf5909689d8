"""``status``, ``wait``, ``prefetch``, ``evict`` and ``flusher``: the local tiers of this host and their flusher."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from pathlib import Path

import fsspec
import pytest
from support.forked import in_child
from support.opened import know_no_store
from support.waiting import HANG_S, until

import tierfs
from tierfs.cli import main
from tierfs.cli.commands.status import UploadRate, one_line, table
from tierfs.errors import CorruptionError, StoreError
from tierfs.flusher.priority import NICER
from tierfs.flusher.upload import Uploader
from tierfs.host.host import ExclusiveLock
from tierfs.host.pending.levels import Level
from tierfs.host.rpc import launch
from tierfs.host.rpc.client import FlusherClient, stop_flusher
from tierfs.host.rpc.protocol import LOCK_NAME
from tierfs.session import compose, open_store, parse_url
from tierfs.session import open as opening
from tierfs.session import tiers as localtiers
from tierfs.session.open import open_bare
from tierfs.store import find, list_directory, save

MIB = 1 << 20
PROGRAM = [sys.executable, "-m", "tierfs.cli"]


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    """A host with its own directories. Its flushers are stopped after the test."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setenv("TIERFS_RAM", "64MiB")
    know_no_store(monkeypatch)
    (tmp_path / "shm").mkdir()
    yield tmp_path
    for tiers in compose.open_tiers.values():
        tiers.close()
    for state in tmp_path.glob("state*"):
        for directory in state.glob("stores/*"):
            stop_flusher(directory, tierfs.__version__, timeout_s=HANG_S)


@pytest.fixture
def nvme(host, monkeypatch):
    """Give an nvme tier to the stores that the test opens."""
    monkeypatch.setenv("TIERFS_NVME", "64MiB")


@pytest.fixture
def no_flusher(monkeypatch):
    """Refuse requests to the flusher, so that staged files stay, until the test calls the returned function."""
    request = FlusherClient.request

    def refuse(*_, **__):
        raise StoreError("not now")

    monkeypatch.setattr(FlusherClient, "request", refuse)
    return lambda: monkeypatch.setattr(FlusherClient, "request", request)


def stage(url, files=3, size=MIB):
    """Write files to this host's memory. They stay there alone while no flusher runs."""
    fs, path = fsspec.url_to_fs(url, ack="staged", skip_instance_cache=True)
    for number in range(files):
        fs.pipe_file(f"{path}/run/f{number}", os.urandom(size))


def store_directory(host, url, state="state"):
    return host / state / "stores" / open_bare(parse_url(url))[0].descriptor.uuid


def is_running(directory):
    lock = ExclusiveLock(directory / LOCK_NAME)
    if lock.acquire():
        lock.release()
        return False
    return True


def test_without_a_command_the_stores_of_this_host_are_shown(host, url, tell, told):
    stage(url, files=1)
    shown = told()
    assert shown["state_directory"] == str(host / "state")
    assert [(one["place"], one["uuid"]) for one in shown["stores"]] == [
        (f"{host}/store", open_bare(parse_url(url))[0].descriptor.uuid)
    ]
    tell("wait", url)
    line = until(lambda: next((line for line in tell().splitlines() if f"{host}/store  -  " in line), None))
    assert line.startswith(f"{host}/store")


@contextlib.contextmanager
def program(*words, **more):
    """Run the program in the background. Kill it at the end."""
    process = subprocess.Popen([*PROGRAM, *map(str, words)], stderr=subprocess.PIPE, text=True, **more)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def sidecar(host, url, *words):
    """Run ``flusher run`` in the foreground of another process. Yield when it serves."""
    directory = store_directory(host, url)
    with program("flusher", "run", url, *words) as process:
        until(lambda: (directory / "flusher.sock").exists() or process.poll() is not None)
        yield process


def ended(process):
    """Return exit code and stderr of a process when it exits by itself."""
    _, errors = process.communicate(timeout=HANG_S)
    return process.returncode, errors


# -- status ------------------------------------------------------------------------------------------------------------


def test_status_shows_what_is_pending_without_a_flusher(url, tell, told, no_flusher):
    stage(url, files=3)
    report = told("status", url)
    assert (report["queue_files"], report["queue_bytes"]) == (3, 3 * MIB)
    assert report["flusher"] == {"running": False}
    assert report["tiers"]["ram"]["dirty_bytes"] >= 3 * MIB
    shown = tell("status", url)
    assert re.search(r"^queue +3 files, 3 MiB", shown, flags=re.MULTILINE)
    assert re.search(r"^flusher +not running$", shown, flags=re.MULTILINE)
    assert re.search(r"^ram +3\.\d+ MiB +64 MiB +3\.\d+ MiB +0 B +staged", shown, flags=re.MULTILINE)
    assert re.search(r"^nvme +off$", shown, flags=re.MULTILINE)
    assert re.search(r"^object .* object +survives the loss of this process, not of this host$", shown, re.MULTILINE)


def test_a_flusher_that_begins_later_makes_no_pending_file_younger(host, url, told, no_flusher):
    stage(url, files=3)
    time.sleep(1)
    no_flusher()
    with sidecar(host, url, "--bandwidth", "1KB"):
        report = told("status", url)
    assert report["flusher"]["running"]
    assert 1 <= report["oldest_age_s"] < HANG_S


def test_status_shows_the_flusher_and_what_it_counted(url, tell, told):
    stage(url, files=2)
    tell("wait", url)
    report = told("status", url)
    assert report["flusher"]["running"] is True
    until(lambda: told("status", url)["rate_bytes_per_s"] > 0)
    shown = tell("status", url)
    assert f"runs, pid {report['flusher']['pid']}" in shown
    assert re.search(r"^  flusher published files +2$", shown, flags=re.MULTILINE)
    assert re.search(r"^  flusher uploaded bytes +2 MiB$", shown, flags=re.MULTILINE)
    assert report["tiers"]["object"]["requests"]["flusher_put"]["requests"] >= 4  # two chunks, two records
    assert re.search(r"^  flusher put +\d+ +0 +2(\.\d+)? MiB +\d+\.\d{3}$", shown, flags=re.MULTILINE)
    metrics = tell("status", url, "--prometheus")
    assert f'tierfs_flusher_published_files_total{{store="{url.removeprefix("tierfs::")}"}} 2\n' in metrics


def test_a_sidecar_collects_and_scrubs_and_status_says_so(host, url, tell, told):
    with sidecar(host, url, "--gc-every", "1h", "--scrub-bandwidth", "100MB"):
        until(lambda: set(told("status", url).get("upkeep", {})) == {"gc", "scrub"})
        shown = tell("status", url)
        assert re.search(r"^last gc +20.*Z, deleted 0 chunks", shown, flags=re.MULTILINE)
        assert re.search(r"^last scrub +20.*Z, verified 0 chunks", shown, flags=re.MULTILINE)
        assert "tierfs_flusher_gc_runs_total{" in tell("status", url, "--prometheus")


def test_a_sidecar_serves_its_metrics_on_request(host, url, tell):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def fetch(path="/metrics"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=HANG_S) as answer:
                return answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.URLError as error:
            return getattr(error, "code", None), ""

    with sidecar(host, url, "--metrics", str(port)) as process:
        stage(url, files=1)
        tell("wait", url)
        kind, text = fetch()
        assert kind.startswith("text/plain; version=0.0.4")
        for name in ("flusher_running", "flusher_published_files_total", "lost_bytes"):
            assert f'tierfs_{name}{{store="{url.removeprefix("tierfs::")}"}} ' in text
        assert fetch("/other")[0] == 404
        with socket.socket() as outside, pytest.raises(OSError):
            outside.connect(("127.0.0.2", port))
        tell("flusher", "stop", url)
        assert ended(process)[0] == 0
    assert main(["flusher", "run", url, "--metrics", "0", "--linger", "1"]) == 2


def test_status_watched_by_a_program_is_one_line_each_time_and_starts_no_flusher(host, url, no_flusher):
    stage(url, files=2)
    with program("status", url, "--watch", "0.1", stdout=subprocess.PIPE) as process:
        lines = [process.stdout.readline() for _ in range(10)]
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ; queue 2 files 2 MiB; .*; flusher not running; ", line)
    assert not is_running(store_directory(host, url))


def test_status_watched_on_a_terminal_is_painted_in_place_and_gives_the_cursor_back(url):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 40, 0, 0))
    there, seen = select.poll(), ""
    there.register(ours, select.POLLIN)

    def read():
        nonlocal seen
        while there.poll(0):
            try:
                seen += os.read(ours, 1 << 16).decode()
            except OSError:  # the other end is closed
                return seen
        return seen

    environment = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with program("status", url, "--watch", "0.1", stdout=theirs, env=environment) as process:
        os.close(theirs)
        until(lambda: read().count("store") >= 3)
        process.send_signal(signal.SIGINT)
        assert ended(process) == (0, "")
        read()
    os.close(ours)
    assert seen.startswith("\x1b[?25l")
    assert seen.endswith("\x1b[?25h")
    *frames, whole = re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", seen)
    assert len(frames) >= 3
    assert "\x1b[1mrequests" in whole
    for frame in frames:
        lines = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", frame).splitlines()
        assert len(lines) <= 8
        assert max(map(len, lines)) <= 40
        assert lines[0].startswith("store")


@pytest.mark.parametrize("words", [["soon"], ["0"], ["nan"], ["--json"]])
def test_an_invalid_watch_is_wrong_usage(url, words, fail):
    code, error = fail("status", url, "--watch", *words)
    assert (code, error["kind"]) == (2, "invalid-input")
    assert "before --watch" in fail("status", "--watch", url)[1]["message"]


def report(**more):
    """Return a status as `tierfs.store.status` does."""
    ram = {"budget_bytes": 64 * MIB, "used_bytes": MIB, "dirty_bytes": 0, "clean_bytes": MIB, "gives": "staged"}
    return {
        "store": "s3://b/run", "uuid": "aa", "ack": "local", "tiers": {"ram": ram}, "flusher": {"running": True, "pid": 7},
        "queue_files": 0, "queue_bytes": 0, "oldest_age_s": 0.0, "conflicts": [], "errors": [], "counters": {}, "misplaced": [], **more,
    }  # fmt: skip


def test_the_table_names_conflicts_and_errors_and_counts_what_is_not_zero():
    conflicts = [{"path": f"run/c{number}\n", "message": "theirs stands"} for number in range(30)]
    errors = [{"path": "run/e", "message": "no network", "attempts": 4}]
    counters = {"flusher_failures": 4, "flusher_slow": 0, "process_waits_for_room": 2}
    shown = table(report(conflicts=conflicts, errors=errors, counters=counters), None)
    assert "  run/c0\\n: theirs stands" in shown
    assert "  ... and 10 more" in shown
    assert "  run/e: attempt 4: no network" in shown
    assert any(re.fullmatch(r"  process waits for room +2", line) for line in shown)
    assert not any("slow" in line for line in shown)
    assert not any("\n" in line for line in shown)
    some = report(conflicts=conflicts[:20], conflict_files=500, failing_files=7)
    assert "  ... and 480 more" in table(some, None)
    assert "conflicts 500, errors 7" in one_line(some, None)


def test_status_shows_requests_and_read_backs():
    put = {"requests": 3, "errors": 1, "bytes": 2 * MIB, "seconds": 0.25}
    tier = {"gives": "object", "survives": "loss of this host", "reads_back": True}
    tier |= {"requests": {"flusher_put": put}, "fallbacks": {"flusher_throttled": 2, "flusher_retried": 0}}
    shown = table(report(tiers={"object": tier}), None)
    assert any(re.fullmatch(r"object .* survives the loss of this host, writes are read back", line) for line in shown)
    assert any(re.fullmatch(r"  flusher put +3 +1 +2 MiB +0\.250", line) for line in shown)
    assert any(re.fullmatch(r"  object fallback flusher throttled +2", line) for line in shown)
    assert not any("retried" in line for line in shown)


def test_a_flusher_that_does_not_answer_is_shown_as_such():
    shown = table(report(flusher={"running": True, "silent": "no answer"}), None)
    assert "flusher           runs, but does not answer: no answer" in shown


def test_the_rate_is_taken_between_two_looks_else_from_the_flusher():
    rate = UploadRate()
    assert rate.sample(report(counters={"flusher_uploaded_bytes": 1000}), 10.0) is None
    assert rate.sample(report(counters={"flusher_uploaded_bytes": 5000}, rate_bytes_per_s=1.0), 12.0) == 2000.0
    another = report(
        counters={"flusher_uploaded_bytes": 9000}, flusher={"running": True, "pid": 8}, rate_bytes_per_s=3.0
    )
    assert rate.sample(another, 14.0) == 3.0
    assert rate.sample(report(flusher={"running": False}), 16.0) is None


def test_one_line_holds_what_changes():
    line = one_line(report(queue_files=2, queue_bytes=MIB, oldest_age_s=90.0), 1024.0)
    assert (
        "queue 2 files 1 MiB; oldest 2 min; upload 1 KiB/s; ram 1 MiB of 64 MiB, dirty 0 B; flusher runs, pid 7" in line
    )


# -- wait --------------------------------------------------------------------------------------------------------------


def test_wait_returns_when_everything_is_in_the_object_tier(url, told):
    stage(url, files=3)
    waited = told("wait", url)
    assert (waited["url"], waited["level"]) == (url, "object")
    assert told("status", url)["queue_files"] == 0
    bare, _ = open_bare(parse_url(url))
    assert [entry.path for entry in list_directory(bare, "run")] == ["run/f0", "run/f1", "run/f2"]


def test_wait_for_what_is_reached_returns_at_once(url, tell, no_flusher):
    stage(url)
    assert tell("wait", f"{url}/run", "--level", "staged") == ""


def test_wait_shows_what_is_pending_while_it_goes_down(url, capsys, no_flusher, monkeypatch):
    monkeypatch.setattr("tierfs.cli.commands.local.LOOK_S", 0.01)
    stage(url, files=3)
    no_flusher()
    assert main(["wait", url, "--progress"]) == 0
    shown = capsys.readouterr().err
    assert "3 files, 3 MiB pending" in shown
    assert "0 files, 0 B pending" in shown
    assert "100%" in shown


def refuse_to_spawn(*_):
    raise OSError("no processes")


def test_wait_that_takes_too_long_names_what_is_pending(url, fail, no_flusher, monkeypatch):
    stage(url, files=2)
    no_flusher()
    # The flusher runs as a thread of this process, and never uploads.
    monkeypatch.setattr(localtiers, "spawn", refuse_to_spawn)
    monkeypatch.setattr(Uploader, "next", lambda _: None)
    code, error = fail("wait", url, "--timeout", "0.3")
    assert (code, error["kind"]) == (11, "timeout")
    assert re.search(r"2 files \(\d+ bytes\) have not reached 'object' yet, run/f\d", error["message"])


def use_no_tiers(monkeypatch, directory):
    monkeypatch.setenv("TIERFS_RAM", "0")
    monkeypatch.setenv("TIERFS_NVME", "0")


def use_another_endpoint(monkeypatch, directory):
    monkeypatch.delenv("TIERFS_RAM")  # tiers that were asked for are an error at any command
    (directory / "place.json").write_text('["https://one.example bucket/run"]')


@pytest.mark.parametrize("use", [use_no_tiers, use_another_endpoint])
def test_pending_files_that_cannot_be_reached_fail_wait_and_status(
    host, url, fail, capsys, no_flusher, monkeypatch, use
):
    stage(url, files=2)
    directory = store_directory(host, url)
    know_no_store(monkeypatch)
    use(monkeypatch, directory)
    for path in ("", "/run", "/run/f1"):
        code, error = fail("wait", f"{url}{path}")
        assert code == 8
        assert "run/f" in error["message"]
    assert main(["status", url, "--json"]) == 8
    assert "run/f" in json.loads(capsys.readouterr().out)["errors"][0]["message"]
    save(open_store(parse_url(url))[0], "other", b"published")
    assert main(["wait", f"{url}/other"]) == 0


def test_wait_for_a_path_that_nobody_wrote_is_not_found(url, fail):
    assert fail("wait", f"{url}/rnu")[0] == 3


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_wait_with_a_timeout_that_makes_no_sense_is_wrong_usage(url, seconds, fail):
    assert fail("wait", url, f"--timeout={seconds}")[0] == 2


# -- conflicts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def conflict(url, no_flusher):
    """``run/f0``: this host changed it, but another writer publishes a change before this host's flush."""
    stage(url, files=1)
    save(open_bare(parse_url(url))[0], "run/f0", b"theirs")
    no_flusher()
    return url


def test_a_conflict_is_waited_for_in_vain_shown_and_discarded(conflict, fail, tell, capsys, told):
    code, error = fail("wait", conflict)
    assert (code, error["kind"]) == (5, "conflict")
    assert "run/f0" in error["message"]
    assert [item["path"] for item in told("status", conflict)["conflicts"]] == ["run/f0"]
    assert "`tierfs flusher discard`" in tell("status", conflict)
    assert told("flusher", "discard", f"{conflict}/run/f0") == {"discarded": 1}
    assert told("status", conflict)["conflicts"] == []
    assert tell("cat", f"{conflict}/run/f0") == "theirs"
    code, error = fail("flusher", "discard", f"{conflict}/run/f0")
    assert code == 3
    assert "tierfs status" in error["message"]


def test_discard_of_a_directory_finds_the_conflicts_behind_a_conflict(url, no_flusher, fail, tell, told):
    stage(url, files=3)
    for name in ("run/f0", "run/f1"):
        save(open_bare(parse_url(url))[0], name, b"theirs")
    no_flusher()
    assert fail("wait", url)[0] == 5
    assert [item["path"] for item in told("status", url)["conflicts"]] == ["run/f0"]
    assert fail("flusher", "discard", f"{url}/run")[0] == 3
    assert told("flusher", "discard", "-r", f"{url}/run") == {"discarded": 2}
    assert told("status", url)["conflicts"] == []
    assert [told("stat", f"{url}/run/{name}")["size"] for name in ("f0", "f1", "f2")] == [6, 6, MIB]


def test_discard_of_a_directory_leaves_a_conflict_elsewhere(url, no_flusher, fail, told):
    stage(url, files=1)
    fs, path = fsspec.url_to_fs(url, ack="staged", skip_instance_cache=True)
    fs.mv(f"{path}/run/f0", f"{path}/other/f0")
    save(open_bare(parse_url(url))[0], "other/f0", b"theirs")
    no_flusher()
    code, error = fail("flusher", "discard", "-r", f"{url}/run")
    assert (code, error["path"]) == (5, "other/f0")
    assert "other/f0" in [item["path"] for item in told("status", url)["conflicts"]]


def test_a_conflicts_data_can_be_exported(conflict, host, fail, tell, told):
    assert fail("wait", conflict)[0] == 5
    target = host / "ours"
    size = told("flusher", "export", f"{conflict}/run/f0", str(target))["bytes"]
    assert target.stat().st_size == size > 0
    assert target.read_bytes() != b"theirs"
    assert fail("flusher", "export", f"{conflict}/run/f0", str(target))[0] == 4
    assert fail("flusher", "export", f"{conflict}/run/f0")[0] == 2
    assert fail("flusher", "export", f"{conflict}/run/f9", str(host / "other"))[0] == 3
    tell("flusher", "discard", f"{conflict}/run/f0")


def test_an_export_that_fails_leaves_no_file(conflict, host, fail, tell, monkeypatch):
    def broken(*_):
        yield b"the first bytes"
        raise CorruptionError("damaged")

    assert fail("wait", conflict)[0] == 5
    monkeypatch.setattr("tierfs.cli.files.transfer.read_pieces", broken)
    assert fail("flusher", "export", f"{conflict}/run/f0", str(host / "ours"))[0] == 6
    assert not (host / "ours").exists()
    tell("flusher", "discard", f"{conflict}/run/f0")


# -- prefetch, evict ---------------------------------------------------------------------------------------------------


def test_prefetch_shows_a_bar_that_ends_full(nvme, url, capsys):
    stage(url, files=2)
    assert main(["wait", url]) == 0
    assert main(["prefetch", f"{url}/run", "--progress"]) == 0
    shown = capsys.readouterr()
    assert "100%" in shown.err
    assert "2 MiB of" in shown.out


def test_prefetched_files_outlive_the_command_until_they_are_evicted(host, monkeypatch):
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "0")
    url = f"tierfs::{tierfs.init(f'{host}/store').url}"
    save(open_store(parse_url(url))[0], "run/a", os.urandom(3 * MIB))
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "64MiB")

    def tell(*words):
        return subprocess.run([*PROGRAM, *words], capture_output=True, check=False, timeout=HANG_S, text=True)

    assert json.loads(tell("prefetch", url, "--json").stdout) == {"bytes": 3 * MIB}
    assert json.loads(tell("status", url, "--json").stdout)["tiers"]["nvme"]["clean_bytes"] >= 3 * MIB
    refused = tell("prefetch", url, "--tier", "ram")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "would be dropped" in refused.stderr
    assert f"MiB of {url}/run/a dropped" in tell("evict", f"{url}/run/a").stdout
    assert json.loads(tell("evict", f"{url}/run", "--json").stdout) == {"bytes": 0}


@pytest.mark.parametrize("command", ["prefetch", "evict"])
def test_a_tier_that_is_off_is_an_error(url, command, fail):
    assert fail(command, f"{url}/run", "--tier", "nvme")[0] == 2


@pytest.mark.parametrize("command", ["prefetch", "evict"])
def test_a_path_that_is_not_there_is_an_error(nvme, url, command, fail):
    assert fail(command, f"{url}/nothing", "--tier", "nvme")[0] == 3


def test_a_flusher_without_the_nvme_tier_is_told_of(nvme, host, url, tell, fail, told):
    with sidecar(host, url, "--nvme", "0"):
        stage(url, files=1)
        tell("wait", url)
        tier = told("status", url)["tiers"]["nvme"]
        assert (tier["gives"], "flusher.log" in tier["problem"]) == ("", True)
        assert "the flusher runs without it" in tell("status", url)
        code, error = fail("prefetch", url)
        assert code == 9
        assert "says whether the flusher has one" in error["message"]
    tell("flusher", "stop", url)
    assert told("status", url)["tiers"]["nvme"]["gives"]


# -- flusher -----------------------------------------------------------------------------------------------------------


def test_a_flusher_in_the_foreground_flushes_until_it_is_told_to_stop(host, url, no_flusher, told):
    stage(url, files=2)
    with sidecar(host, url) as process:
        no_flusher()
        until(lambda: told("status", url)["queue_files"] == 0)
        assert told("status", url)["flusher"]["pid"] == process.pid
        process.terminate()
        code, log = ended(process)
    assert code == 0
    assert not is_running(store_directory(host, url))
    events = [dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)) for line in log.splitlines()]
    assert all(list(event)[:4] == ["time", "level", "logger", "message"] for event in events)
    published = [event for event in events if event["message"].startswith('"published')]
    assert sorted(event["path"] for event in published) == ["run/f0", "run/f1"]
    assert {event["bytes"] for event in published} == {str(MIB)}


def test_ctrl_c_ends_a_flusher_whose_log_may_be_json_and_a_second_one_is_refused(host, url):
    with sidecar(host, url, "--log-format", "json") as process:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, os.getpid())
        done = subprocess.run([*PROGRAM, "flusher", "run", url], check=False, capture_output=True, text=True)
        process.send_signal(signal.SIGINT)
        code, log = ended(process)
    assert done.returncode == 4
    assert f"tierfs flusher stop {url}" in done.stderr
    assert "exit_code=4" in done.stderr
    assert code == 0
    last = json.loads(log.splitlines()[-1])
    assert (last["message"].endswith("has ended"), last["level"]) == (True, "info")


@pytest.mark.parametrize("uuid", ["../../x", "ab" * 15, "AB" * 16, "ab" * 16 + "\n"])
def test_an_id_that_no_store_has_is_refused(url, uuid, capsys):
    assert main(["flusher", "run", "--uuid", uuid, url]) == 2
    assert "--uuid" in capsys.readouterr().err


def test_stop_ends_the_flusher_that_runs_and_says_whether_there_was_one(host, url, tell, told):
    with sidecar(host, url) as process:
        assert told("flusher", "stop", url)["stopped"] is True
        assert ended(process)[0] == 0
    assert "was not running" in tell("flusher", "stop", url)


def test_stop_ends_the_flusher_of_a_store_while_its_object_tier_is_away(host, url, told, fail, monkeypatch):
    def away(*_, **__):
        raise StoreError("no answer", transient=True)

    with sidecar(host, url) as process:
        monkeypatch.setattr(opening, "read_descriptor", away)
        assert fail("flusher", "stop", host / "another")[0] == 8
        assert told("flusher", "stop", url)["stopped"] is True
        assert ended(process)[0] == 0


def test_stop_ends_a_flusher_though_it_is_not_known_any_more_whose_tiers_these_are(host, url, told):
    with sidecar(host, url) as process:
        (store_directory(host, url) / "place.json").write_text("[")
        assert told("flusher", "stop", url)["stopped"] is True
        assert ended(process)[0] == 0


def test_a_copy_does_not_stop_the_flusher_of_what_it_is_a_copy_of(host, url, fail):
    shutil.copytree(host / "store", host / "copy")
    with sidecar(host, url) as process:
        assert fail("flusher", "stop", f"tierfs::file://{host}/copy")[0] == 2
        assert process.poll() is None


def test_a_flusher_that_does_not_linger_ends_when_its_client_goes(host, url):
    with sidecar(host, url, "--linger", "0") as process:
        with FlusherClient(store_directory(host, url), refuse_to_spawn, tierfs.__version__, dict) as client:
            client.request("status")
        assert ended(process)[0] == 0


def test_a_flusher_for_a_client_gives_way_to_it_and_logs_nothing(host, url, tell, told, monkeypatch):
    monkeypatch.setattr(localtiers, "spawn", launch.spawn)
    stage(url, files=1)
    tell("wait", url)
    directory = store_directory(host, url)
    pid = until(lambda: told("status", url)["flusher"].get("pid"))
    assert directory.name in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    threads = {
        int(task.name): os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()
    }
    # Threads that upload give way, and those that answer clients do not.
    assert threads[pid] == own
    assert set(threads.values()) == {own, min(own + NICER, 19)}
    assert (directory / "flusher.log").read_text() == ""


def test_drafts_of_a_client_that_died_early_are_flushed(host, url, no_flusher):
    assert in_child(lambda: (stage(url, files=2), os.kill(os.getpid(), signal.SIGKILL))) == signal.SIGKILL
    no_flusher()
    directory = store_directory(host, url)
    # The flusher starts with the arguments of `LocalTiers.launch`, and no client connects.
    words = ["--uuid", directory.name, "--state-dir", host / "state", "--ram", 64 * MIB, "--nvme", 0]
    with program("flusher", "run", url.removeprefix("tierfs::"), *words, "--linger", 0) as process:
        bare = open_bare(parse_url(url))[0]
        until(lambda: sum(entry.path.startswith("run/") for entry in find(bare, "")) == 2)
        process.terminate()
        assert ended(process) == (0, "")


SPAWNED = """
import resource, sys
from tierfs.cli import app as frame
from tierfs.cli.commands import flusher
from tierfs.flusher.server import Service
{before}
words = ["run", "file:///nothing", "--uuid", "ab" * 16, "--state-dir", sys.argv[1], "--ram", "67108864", "--nvme", "0"]
engine, directory = flusher._spawned(frame.build_parser("flusher").parse_intermixed_args(words))
engine.start()
{after}
engine.stop()
engine.close()
"""
ANSWERS = """
engine.handle("hello", {"options": {}}, None)
late = {"fsspec", "asyncio", "ssl", "rich", "tierfs.store", "tierfs.objects", "tierfs.fs", "torch"} & set(sys.modules)
assert not late, late
assert "priority_refused" not in engine.handle("status", {}, None)["counters"]
"""
REFUSES = """
import os, pathlib
from tierfs.flusher import priority
os.getsid = lambda _: os.getpid()
priority.SESSION = pathlib.Path("/")  # a directory cannot be written
"""
COUNTS = 'assert engine.handle("status", {}, None)["counters"]["priority_refused"] == 1'
LIMITED = """
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
"""
UNLIMITED = """
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65536)
assert len(set(resource.getrlimit(resource.RLIMIT_AS))) == 1
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ANSWERS),
        (REFUSES, COUNTS),
        (LIMITED, UNLIMITED),
    ],
    ids=["loads the object tier late", "counts that it cannot give way", "has no limits of the client"],
)
def test_a_flusher_that_a_client_spawns(host, before, after):
    code = SPAWNED.format(before=before, after=after)
    subprocess.run([sys.executable, "-c", code, str(host / "state")], check=True, timeout=HANG_S)


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [("tierfs::memory://bucket/run", 2, "memory of one process"), ("/nothing/there", 3, "kind=store-not-found")],
)
def test_a_flusher_for_no_store_of_this_host_is_refused(where, code, words, capsys):
    assert main(["flusher", "run", where]) == code
    assert words in capsys.readouterr().err


def test_a_flusher_never_writes_into_another_store_that_took_the_place_of_its_own(host, url, no_flusher, fail):
    stage(url, files=1)
    shutil.rmtree(host / "store")
    refused = subprocess.run([*PROGRAM, "init", str(host / "store")], check=False, capture_output=True, text=True)
    assert refused.returncode
    assert "this host has changes pending for the store that was at" in refused.stderr
    elsewhere = dict(os.environ, TIERFS_RAM="0", TIERFS_STATE_DIR=str(host / "another"))
    subprocess.run([*PROGRAM, "init", str(host / "store")], check=True, capture_output=True, env=elsewhere)
    no_flusher()
    store = next(iter(opening.open_stores.values()))
    with pytest.raises(tierfs.TierfsError, match=r"is no longer at"):
        store.tiers.wait("", Level.OBJECT, HANG_S)
    assert not list((host / "store").rglob("run*"))


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--json"],
        ["run", "--linger=-1"],
        ["run", "--metrics=65536"],
        ["stop", "--ram", "1GiB"],
        ["discard", "--log-format", "json"],
        ["dance"],
    ],
)
def test_options_that_belong_to_another_action_are_wrong_usage(url, words, capsys):
    assert main(["flusher", *words, url]) == 2


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ("info", r"tierfs: info: made the store file://\S+$"),
        ("info,text", r"tierfs: info: made the store file://\S+$"),
        ("INFO, logfmt", r'time=\S+Z level=info logger=tierfs\.store message="made the store file://\S+"$'),
        (
            "info,json",
            r'\{"time": "\S+Z", "level": "info", "logger": "tierfs\.store", "message": "made the store \S+"\}$',
        ),
        (",json", "$"),
    ],
)
def test_tierfs_log_sets_level_and_format(host, wish, pattern, monkeypatch, capsys):
    monkeypatch.setenv("TIERFS_LOG", wish)
    assert main(["init", str(host / "new")]) == 0
    assert re.match(pattern, capsys.readouterr().err)


@pytest.mark.parametrize("wish", ["loud", "info,xml", "json", "info,json,more"])
def test_tierfs_log_that_names_something_else_is_an_error(wish, monkeypatch, capsys):
    monkeypatch.setenv("TIERFS_LOG", wish)
    assert main(["version"]) == 2
    assert "debug, info, warning, error" in capsys.readouterr().err


def test_an_event_of_several_lines_is_one_line_with_its_exception(monkeypatch, capsys):
    import logging

    from tierfs.cli.terminal.output import logging_to_stderr

    with logging_to_stderr(format="logfmt"):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("tierfs.flush").exception('it = "broken"\nreally', extra={"path": "a b", "count": 3})
    (line,) = capsys.readouterr().err.splitlines()
    assert r'message="it = \"broken\"\nreally"' in line
    assert 'path="a b" count=3 exception="Traceback' in line


def test_a_disk_without_room_for_the_log_does_not_end_the_work_that_is_told_of(monkeypatch, tmp_path):
    import logging

    from tierfs.cli.terminal.output import logging_to_stderr

    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        with logging_to_stderr():
            logging.getLogger("tierfs.flush").warning("the nvme tier is full")
        os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), full.fileno())
        with logging_to_stderr():
            logging.getLogger("tierfs.flush").warning("there is room again")
        monkeypatch.undo()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert "the nvme tier is full" in first
    assert "there is room again" in second
