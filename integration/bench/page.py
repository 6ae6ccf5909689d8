"""What `tierfs ui` costs a training loop that saves while a page watches it.

``python integration/bench/page.py`` takes four minutes on two idle cores. Each round trains with the server and one
page, with the server alone, and without either, in changing order. The page is a process that listens to the server's
events and fetches the rows that changed, as the page's program does: the browser usually runs on another machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from harness import Aims, Rows, cpu_seconds, end_flusher, machine, parser, private_slabs, say

import tierfs
from tierfs.host.pending.levels import Level
from tierfs.store import status, wait
from tierfs.train import Every, Latest, Manager, TrainState

WIDTH, LAYERS = 1024, 3
"""12 MiB of weights, and 24 MiB of AdamW's state."""
SAVE_EVERY = 50
KEPT = 10
WAYS = ("no server", "server alone", "one page")


def watch(port: int) -> None:
    """Do what a page does that shows one store."""

    def ask(path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
        return connection.getresponse()

    ask("/api/stores.json").read()
    ask("/api/checkpoints.json?store=0&since=0&limit=100").read()
    seen: list[int] = []
    stream = ask("/api/events")
    while line := stream.readline():
        if line == b"event: store\n":
            fresh = json.loads(stream.readline().removeprefix(b"data: "))["list"]
            if fresh != seen:
                ask(f"/api/checkpoints.json?store=0&since={seen[0] if seen else 0}").read()
                seen = fresh


class Training:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, scheduler=None, dataloader=None)
        self.batch = torch.randn(64, WIDTH)
        self.made = 0

    def step(self) -> float:
        self.made += 1
        loss = (self.model(self.batch) - self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def train(manager: Manager, training: Training, saves: int) -> dict[str, float]:
    """Train until so many saves were made, and return steps per second and the median milliseconds that they blocked."""
    blocked: list[float] = []
    first, begin = training.made, time.perf_counter()
    while len(blocked) < saves:
        saved = manager.step(training.made, training.state, metrics={"loss": training.step()})
        if saved is not None:
            blocked.append(saved.blocked_s * 1e3)
    took = time.perf_counter() - begin
    return {"steps/s": (training.made - first) / took, "blocked ms": statistics.median(blocked)}


@contextlib.contextmanager
def watched(way: str, url: str) -> Iterator[int | None]:
    """Run the server, if there is one, with a page or without, and give its process id."""
    if way == "no server":
        yield None
        return
    command = [sys.executable, "-m", "tierfs.cli", "ui", url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().partition("/  ")[0].rpartition(":")[2])
        page = multiprocessing.get_context("spawn").Process(target=watch, args=(port,), daemon=True)
        if way == "one page":
            page.start()
        yield server.pid
        if way == "one page":
            page.terminate()
            page.join()
        server.send_signal(signal.SIGINT)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--saves", type=int, default=3, help="for each way and round (default: 3)")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # the other core is for the flusher, the server and the page
    rows, training = Rows(), Training()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, private_slabs():
        os.environ["TIERFS_STATE_DIR"] = f"{directory}/state"
        url = f"tierfs::file://{directory}/store"
        store = tierfs.init(url)
        with Manager(url, save=[Every(steps=SAVE_EVERY)], keep=[Latest(KEPT)], ram="256MiB", nvme="0") as manager:
            train(manager, training, 3)  # the first saves wait for new memory
            for number in range(options.rounds):
                for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                    with watched(way, url) as server:
                        train(manager, training, 1)  # the server has started, and the page shows the store
                        before, begin = cpu_seconds(server) if server else 0.0, time.perf_counter()
                        rows.note(way, **train(manager, training, options.saves))
                        if server:
                            share = (cpu_seconds(server) - before) / (time.perf_counter() - begin)
                            rows.note(way, **{"server's share of a core": share})
        wait(store, "", Level.OBJECT)
        end_flusher(status(store))
    aims = Aims()
    aims.at_least(
        "steps/s with one page, of those without a server", rows.ratio("steps/s", "one page", "no server"), 0.95
    )
    aims.at_most(
        "blocked ms with one page, of those without a server", rows.ratio("blocked ms", "one page", "no server"), 1.1
    )
    say({"machine": machine(torch=torch.__version__), **rows.medians(), "aims": aims.found}, as_json=options.json)
    return int(not all(aim["holds"] for aim in aims.found))


if __name__ == "__main__":
    raise SystemExit(main())
