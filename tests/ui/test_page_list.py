"""The list of the page: how old it is, what it does not know, what has gone, and what it must not show."""

import base64
import contextlib
import functools
import http.server
import threading
import types

import fsspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("uvicorn", reason="the extra tierfs[ui] is not installed")

from support import gatedfile
from support.page import served
from support.waiting import until

import tierfs
from tierfs.cli import main
from tierfs.train import Every, Manager
from tierfs.ui import view

SECRET = "hidden-word"


def train(url, *steps, **options):
    with Manager(url, save=[Every(steps=1)], **options) as manager:
        for step in steps:
            manager.step(step, {"w": torch.randn(100_000)})


def steps_of(document):
    return [row["step"] for row in document["checkpoints"]]


@pytest.fixture
def root(tmp_path):
    tierfs.init(str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def gate(monkeypatch, tmp_path):
    """A file. While it is there, no listing of ``gatedfile://`` ends."""
    gate = gatedfile.register(monkeypatch, tmp_path / "site")
    for tier in ("RAM", "NVME"):
        monkeypatch.setenv(f"TIERFS_{tier}", "0")  # a store has local tiers under one name alone
    yield gate
    gate.unlink(missing_ok=True)


@pytest.fixture
def gated(root, gate):
    """The page of a run of three checkpoints whose first listing has not ended."""
    train(f"tierfs::file://{root}/run", 1, 2, 3, ack="object")
    gate.touch()
    with served(f"gatedfile://{root}/run") as page:
        yield page
        gate.unlink(missing_ok=True)  # so that the server ends


def test_before_the_first_listing_the_page_says_so(gated, gate):
    document = gated.get("checkpoints", since=0)
    assert (document["checkpoints"], document["age_s"]) == ([], None)
    assert gated.get("stores")["stores"][0]["list_age_s"] is None
    plain = gated.ask("/plain")[2].decode()
    assert "is being read" in plain
    assert "0 checkpoints" not in plain
    gate.unlink()
    document = gated.get("checkpoints")
    assert steps_of(document) == [3, 2, 1]
    assert 0 <= document["age_s"] < 100
    assert "3 checkpoints, listed " in gated.ask("/plain")[2].decode()


def test_a_slow_listing_does_not_delay_the_next_one(monkeypatch):
    now = types.SimpleNamespace(wall_s=50.0, used_s=7.0)
    clocks = types.SimpleNamespace(monotonic=lambda: now.wall_s, process_time=lambda: now.used_s)
    monkeypatch.setattr("tierfs.ui.view.time", clocks)
    pace = view._Schedule()  # a page would show only after half a minute that it counts the wrong seconds
    assert pace.is_due
    for used_s, pause_s in ((0.0, view.LIST_S_MIN), (0.02, 8.0), (60.0, view.LIST_S_MAX)):
        with pace.turn():
            now.wall_s += 100  # it waits for the store, or for its turn
            now.used_s += used_s
        now.wall_s += pause_s - 0.001
        assert not pace.is_due
        now.wall_s += 0.002
        assert pace.is_due


def test_a_row_on_screen_goes_although_a_listing_lasts(root, gated, gate):
    gate.unlink()
    first = gated.get("checkpoints")
    gate.touch()
    assert main(["rm", "-r", f"tierfs::file://{root}/run/step_2"]) == 0
    found = gated.get("checkpoints", since=first["version"], row=["run/step_1", "run/step_2", "unknown"])
    assert found["gone"] == ["run/step_2"]
    assert found["found"] == 2
    assert steps_of(gated.get("checkpoints", since=0)) == [3, 1]


def test_stored_bytes_are_unknown_until_all_are(root):
    url = f"tierfs::file://{root}/run"
    train(url, 1, ram="64MiB", nvme="0", bandwidth="200kB")
    with served(url) as page:
        seen = []

        def stored():
            [row] = page.get("checkpoints")["checkpoints"]
            seen.append((row["level"], row["stored"], row["new"]))
            return row["stored"]

        stored_bytes = until(stored, every_s=0.2)
        assert main(["wait", url, "--timeout", "60"]) == 0
        assert main(["flusher", "stop", url]) == 0
    assert stored_bytes > 100_000
    assert [(size, new) for level, size, new in seen if level != "object"], "it was stored at once"
    assert {(size, new) for level, size, new in seen if level != "object"} == {(None, None)}
    assert 0 not in {size for _, size, _ in seen}


def test_checkpoints_that_are_one_file_are_listed(root):
    url = f"tierfs::file://{root}/run"
    with served(url) as page:
        assert page.get("checkpoints")["files"] == []
        assert "Single files" not in page.ask("/plain")[2].decode()
        version = page.get("checkpoints", since=0)["version"]
        for name in ("epoch=9.ckpt", "epoch=10.ckpt", "notes.txt"):
            with fsspec.open(f"{url}/{name}", "wb", ack="object") as file:
                torch.save({"epoch": 9}, file)
        files = until(lambda: page.get("checkpoints", since=version)["files"], every_s=0.5)
        until(lambda: len(page.get("checkpoints", since=version)["files"]) == 2, every_s=0.5)
        files = page.get("checkpoints")["files"]
        assert [file["name"] for file in files] == ["epoch=10.ckpt", "epoch=9.ckpt"]
        assert {(file["path"].partition("/")[0], file["size"] > 100, file["level"]) for file in files} == {
            ("run", True, "object")
        }
        assert page.get("checkpoints", since=page.get("checkpoints")["version"])["files"] is None
        assert "epoch=10.ckpt" in page.ask("/plain")[2].decode()


class _Asking(http.server.SimpleHTTPRequestHandler):
    """Serves a directory to one user with a password."""

    def do_GET(self):
        if self.headers.get("Authorization") == "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode():
            super().do_GET()
        else:
            self.send_response(401)
            self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web(directory):
    handler = functools.partial(_Asking, directory=directory)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def everything(page):
    """Return what the page answers, whatever it is."""
    names = ("stores", "status", "checkpoints", "prune", "files", "times")
    paths = ("/plain", "/metrics", *(f"/api/{name}.json" for name in names), "/api/checkpoints.json?since=0")
    answers = [page.ask(path)[2].decode() for path in paths]
    with contextlib.closing(page.events()) as events:
        return "\n".join([*answers, str([data for _, data in (next(events), next(events))])])


def test_no_answer_has_the_password_of_a_url(root, capfd):
    with web(root.parent) as port, served(f"http://me:{SECRET}@127.0.0.1:{port}/store") as page:
        until(lambda: page.get("stores")["stores"][0]["report"], every_s=0.5)
        found = everything(page)
    assert f"http://me:***@127.0.0.1:{port}/store" in found
    assert SECRET not in found
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize("kind", ["sftp", "ftp", "ssh", "tierfs::sftp", "smb", "nothing"])
def test_no_error_has_the_password_of_a_url(kind, capfd):
    url = f"{kind}://me:{SECRET}@127.0.0.1:1/store"
    with served(url) as page:
        alarm = until(lambda: page.get("stores")["stores"][0]["alarms"], every_s=0.2)[0]["what"]
        found = everything(page)
    assert "me:***@127.0.0.1:1" in alarm
    assert SECRET not in found
    assert main(["status", url]) > 0
    assert main(["doctor", url]) == 1
    printed = "".join(capfd.readouterr())
    assert SECRET not in printed
