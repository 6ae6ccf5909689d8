"""`tierfs ui` as a process: its documents equal those of the commands, and it answers nobody else."""

import contextlib
import json
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("uvicorn", reason="the extra tierfs[ui] is not installed")

from support.page import served
from support.waiting import until

import tierfs
from tierfs.cli import main
from tierfs.session import open_store, parse_url
from tierfs.store import save
from tierfs.train import Every, Manager

LAYERS, STEPS = 3, (10, 20, 30)
KEEP = ("latest:1", "best:1:loss")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The URL of a run of three checkpoints that the training manager saved, with a pin and a hostile name."""
    root = tmp_path_factory.mktemp("page") / "store"
    tierfs.init(str(root))
    url = f"tierfs::file://{root}/run"
    torch.manual_seed(1)
    state = {"model": {f"layers.{layer}.weight": torch.randn(64, 64) for layer in range(LAYERS)}, "step": 0}
    with Manager(url, save=[Every(steps=10)], ack="object", ram="64MiB", nvme="0") as manager:
        for step in STEPS:
            state["model"]["layers.1.weight"] += 0.01
            manager.step(step, state, metrics={"loss": 1 / step})
    save(open_store(parse_url(url))[0], "run/step_20/.pinned", b"")
    assert main(["wait", url, "--timeout", "60"]) == 0
    assert main(["flusher", "stop", url]) == 0  # it would end by itself between two requests
    return url


@pytest.fixture(scope="module")
def page(run):
    with served(run) as server:
        yield server


@pytest.fixture
def told(capsys):
    def run_command(*words):
        capsys.readouterr()
        assert main([*words, "--json"]) in {0, 1}
        return json.loads(capsys.readouterr().out)

    return run_command


def test_the_list_is_that_of_checkpoint_ls(page, run, told):
    rows = page.get("checkpoints")["checkpoints"]
    listed = told("checkpoint", "ls", run, "--usage")["checkpoints"]
    assert [row["step"] for row in rows] == sorted(STEPS, reverse=True)
    assert [{key: row[key] for key in listed[0]} for row in reversed(rows)] == listed
    assert [row["metrics"] for row in rows] == [{"loss": 1 / step} for step in reversed(STEPS)]
    assert [row["pinned"] for row in rows] == [False, True, False]
    assert page.get("checkpoints")["best"] == {"loss": {"min": "run/step_30", "max": "run/step_10"}}


def test_rules_are_tried_as_prune_decides(page, run, told):
    rules = [word for rule in KEEP for word in ("--keep", rule)]
    assert page.get("prune", keep=KEEP)["checkpoints"] == told("prune", run, *rules, "--dry-run")["checkpoints"]
    assert "latset" in page.get("prune", code=400, keep="latset:3")["error"]["message"]
    assert "no checkpoint" in page.get("prune", code=404, keep="best:1:los")["error"]["message"]


def test_content_and_differences_are_those_of_the_commands(page, run, told):
    a, b = f"{run}/step_10", f"{run}/step_30"
    assert page.get("checkpoint", path="run/step_10", codecs=1) == told("checkpoint", "show", a, "--codecs")
    assert page.get("diff", a="run/step_10", b="run/step_30") == told("checkpoint", "diff", a, b)
    times = page.get("times", path="run")["times"]
    assert [each["step"] for each in times] == sorted(STEPS, reverse=True)


def test_status_and_metrics_are_those_of_status(page, run):
    def tell(*words):
        command = [sys.executable, "-m", "tierfs.cli", "status", run, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    mine, theirs = page.get("status"), json.loads(tell("--json"))
    for report in (mine, theirs):
        for counts in (report["counters"], report["tiers"]["object"]["requests"]):
            for name in [name for name in counts if name.startswith("process_")]:
                counts.pop(name)
        for name in ("records", "kernels", "unused_folders", "misplaced"):  # of each process, or of the whole host
            report.pop(name)
    assert mine == theirs
    _, headers, body = page.ask("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    exposed = [
        [
            line
            for line in text.splitlines()
            if "process" not in line and "records" not in line and "age_seconds" not in line
        ]
        for text in (body.decode(), tell("--prometheus"))
    ]
    assert exposed[0] == exposed[1]
    assert len(exposed[0]) > 20


def test_files_are_those_of_ls_and_can_be_looked_into(page, run, told):
    listed = told("ls", f"{run}/step_10")["entries"]
    found = page.get("files", path="run/step_10")["entries"]
    assert [{key: row[key] for key in listed[0]} for row in found] == listed
    assert {row["level"] for row in found} == {"object"}
    shard = next(row["path"] for row in found if row["name"].endswith(".safetensors"))
    tensors = page.get("preview", path=shard)["tensors"]
    assert {tuple(each["shape"]) for each in tensors if "layers" in each["name"]} == {(64, 64)}
    assert json.loads(page.get("preview", path="run/step_10/.metrics")["text"]) == {"loss": 0.1}
    assert page.ask(f"/download?path={shard}")[0] == 403


@pytest.mark.parametrize("number", ["-1", "x", "9" * 5000])
def test_a_version_that_is_no_number_is_refused(page, number):
    assert page.get("checkpoints", code=400, since=number)["error"]["kind"] == "invalid-input"


def test_a_path_above_the_url_is_not_shown(page):
    for name, key in (("files", "path"), ("preview", "path"), ("checkpoint", "path"), ("diff", "a")):
        for path in ("", "other", "run/../other", "run/step_10/../../x", ".tierfs/store.json"):
            document = page.get(name, code=400 if ".." in path else 404, **{key: path, "b": "run/step_10"})
            assert set(document) == {"error"}


def test_another_origin_or_host_or_method_gets_nothing(page):
    names = ("/api/status.json", "/metrics", "/plain", "/api/events", "/")
    for path in names:
        assert page.ask(path, "POST")[0] == 405
        assert page.ask(path, Host="evil.example")[0] == 421
        assert page.ask(path, Host=f"127.0.0.1.evil.example:{page.port}")[0] == 421
        assert page.ask(path, Host=f"192.0.2.1:{page.port}")[0] == 421
        assert page.ask(path, Origin="https://evil.example")[0] == 403
        assert page.ask(path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403
    status, headers, _ = page.ask("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert (status, "default-src 'self'" in headers["content-security-policy"]) == (200, True)
    assert not [name for name in headers if name.lower().startswith("access-control")]
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/", "/nothing"):
        assert page.ask(path)[0] in {404, 405}


def test_data_needs_the_token(run):
    with served(run, "--token", "--allow-download") as page:
        assert page.token
        for path in ("/api/status.json", "/api/login", "/metrics", "/plain", "/api/events", "/download?path=run"):
            assert page.ask(path)[0] == 401
            assert page.ask(path, Authorization="Bearer wrong")[0] == 401
            assert page.ask(path, Cookie=f"tierfs-ui-{page.port}=wrong; x")[0] == 401
        assert page.ask("/")[0] == page.ask("/static/app.js")[0] == 200
        _, headers, _ = page.ask("/api/login", Authorization=f"Bearer {page.token}")
        cookie = headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert page.ask("/api/status.json", Cookie=cookie.split(";")[0])[0] == 200
        own = {"Authorization": f"Bearer {page.token}"}
        status, headers, body = page.ask("/download?path=run/step_10/.metrics", **own)
        assert (status, body, headers["content-type"]) == (200, b'{"loss": 0.1}', "application/octet-stream")
        assert headers["content-disposition"].startswith("attachment")


def test_a_change_arrives_as_an_event_and_by_its_version(tmp_path):
    tierfs.init(str(tmp_path / "store"))
    url = f"tierfs::file://{tmp_path}/store"
    with served(url) as page, contextlib.closing(page.events()) as events:
        first = page.get("checkpoints")
        assert (first["checkpoints"], first["gone"]) == ([], [])
        with Manager(f"{url}/run", save=[Every(steps=1)], ack="object") as manager:
            manager.step(7, {"w": torch.ones(10)})
        assert next(events)[0] == "hello"
        assert next(data for name, data in events if name == "store" and data["list"][2] == 1)["error"] is None
        assert next(name for name, _ in events if name == "beat")

        def whole():
            found = page.get("checkpoints", since=first["version"])
            return found if [(row["step"], row["state"]) for row in found["checkpoints"]] == [(7, "complete")] else None

        second = until(whole, every_s=0.5)
        assert main(["rm", "-r", f"{url}/run/step_7"]) == 0
        until(lambda: not page.get("checkpoints")["checkpoints"], every_s=0.5)
        assert page.get("checkpoints", since=second["version"])["gone"] == ["run/step_7"]
        assert page.stop() == 0


def test_a_store_that_cannot_be_read_is_an_alarm(tmp_path):
    with served(str(tmp_path / "nothing")) as page:
        store = page.get("stores")["stores"][0]
        assert store["error"] == "store-not-found"
        assert "tierfs init" in store["alarms"][0]["what"]
        assert page.get("status", code=404)["error"]["kind"] == "store-not-found"
        tierfs.init(str(tmp_path / "nothing"))
        until(lambda: page.ask("/api/status.json")[0] == 200, every_s=0.5)
        assert page.get("stores")["stores"][0]["error"] is None


@pytest.mark.outlived  # the page's threads end with the process
def test_a_port_in_use_and_wrong_arguments_are_errors(run, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["ui", run, "--port", str(taken.getsockname()[1])]) == 2
        assert "cannot be used" in capsys.readouterr().err
    assert main(["ui", run, "--keep", "newest:3"]) == 2
    assert main(["ui", run, "--max-age", "soon"]) == 2
