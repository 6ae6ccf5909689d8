"""The cost of the training manager: a step without a save, on one rank and on two, and finding a step among many.

``python integration/bench/manager.py`` takes under a minute. ``--roots 500`` makes fewer steps to search, ``--json``
prints plain values.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Aims, parser, say

import tierfs
from tierfs.dcp.address import Address
from tierfs.store import copy, list_directory
from tierfs.store.status import request_metrics
from tierfs.threads import transfers
from tierfs.train import Deadline, Every, Manager, Preemption, YoungDaly

OPTIONS: dict[str, Any] = {"ram": "0", "nvme": "0"}
POLICIES = [Every(steps=10**9), Every(minutes=10**6), Preemption(), Deadline(), YoungDaly(mtbf="10000d")]
STEPS = 20_000
STEPS_OF_TWO = {0.02: 400, 0.2: 100}
"""How many steps two ranks run, by the seconds of a step. Steps of large models take longer than either."""
TIMES = 5


def state() -> dict[str, Any]:
    return {"weight": torch.ones(1000), "count": 1}


def one_rank(url: str) -> dict[str, float]:
    """Return the mean and the median microseconds of a call."""
    live, metrics = state(), {"loss": 1.0}
    took_ns = []
    with Manager(url, save=POLICIES, **OPTIONS) as run:
        for step in range(STEPS):
            begun = time.perf_counter_ns()
            saved = run.step(step, live, metrics=metrics)
            took_ns.append(time.perf_counter_ns() - begun)
            assert saved is None or step < 5, "a policy asked for a save"  # the manager's first save measures its cost
        run.wait()
    quiet = took_ns[100:]
    return {"mean us": statistics.fmean(quiet) / 1e3, "median us": statistics.median(quiet) / 1e3}


def two_ranks(rank: int, directory: str, url: str, steps_s: list[float]) -> None:
    """Measure the share of the time that calls take, for steps that take so many seconds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/world", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found = {step_s: _two_ranks(f"{url}-{step_s}", step_s, STEPS_OF_TWO[step_s]) for step_s in steps_s}
    if rank == 0:
        Path(directory, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _two_ranks(url: str, step_s: float, steps: int) -> dict[str, float]:
    live, gradient = state(), torch.ones(1000)
    with Manager(url, save=[Every(steps=10**9), Every(minutes=10**6), Preemption()], **OPTIONS) as run:
        in_calls_s = 0.0
        for step in range(steps + 50):
            if step == 50:  # the ranks know by this step how often to agree
                in_calls_s, begun_all = 0.0, time.perf_counter()
            time.sleep(step_s)
            dist.all_reduce(gradient)  # ranks end a step together, as in training
            begun = time.perf_counter()
            run.step(step, live)
            in_calls_s += time.perf_counter() - begun
        return {
            "share": in_calls_s / (time.perf_counter() - begun_all),
            "us a step": in_calls_s / steps * 1e6,
            "agree every": run._decider._at_steps.every,
        }


def requests_of(run: Manager) -> dict[str, int]:
    """Return this process's requests to the object tier. A listing counts once, whatever its number of pages."""
    store, _ = run._run.open()
    counts = {
        method: int(each["requests"]) for method, each in request_metrics(store.objects)["object_requests"].items()
    }
    lists = counts.get("list", 0)
    return {"list": lists, "others": sum(counts.values()) - lists}


def many_steps(base: Path, count: int) -> dict[str, float]:
    """Return the seconds to find the newest of many steps, in this process and from the beginning of a restore."""
    url = f"tierfs::file://{base}/run"
    with Manager(url, save=(), **OPTIONS) as run:
        run.save(0, state()).wait()
    store, path = Address.of(url, OPTIONS).open()
    names = [entry.path.rpartition("/")[2] for entry in list_directory(store, f"{path}/step_0", detail=False)]

    def copy_step(step: int) -> None:
        # Of earlier steps, only the metadata is read.
        for name in names if step == count - 1 else [".metadata"]:
            copy(store, f"{path}/step_0/{name}", f"{path}/step_{step}/{name}")

    transfers().map(copy_step, range(1, count))
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(TIMES):
        with Manager(url, save=(), **OPTIONS) as run:
            before, begun = requests_of(run), time.perf_counter()
            assert run.latest() == count - 1
            found["latest s"].append(time.perf_counter() - begun)
            for method in ("list", "others"):
                found[f"latest, requests, {method}"].append(requests_of(run)[method] - before[method])
            begun = time.perf_counter()
            assert run.restore(state()).step == count - 1
            found["restore s"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            run.restore(state(), step=count - 1)
            found["restore one s"].append(time.perf_counter() - begun)
    medians = {name: statistics.median(values) for name, values in found.items()}
    medians["search s"] = medians["restore s"] - medians["restore one s"]
    return medians


def main() -> int:
    arguments = parser(__doc__, "directory for the stores")
    arguments.add_argument("--roots", type=int, default=10_000, help="steps to search")
    arguments.add_argument(
        "--step-seconds",
        type=float,
        nargs="+",
        default=list(STEPS_OF_TWO),
        choices=list(STEPS_OF_TWO),
        help="seconds of a step of two ranks",
    )
    given = arguments.parse_args()
    logging.disable(logging.WARNING)
    aims = Aims()
    results: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=given.directory) as directory:
        base = Path(directory)
        os.environ["TIERFS_STATE_DIR"] = str(base / "state")
        for name in ("one", "two", "many"):
            tierfs.init(f"file://{base}/{name}")
        results["one rank"] = one_rank(f"tierfs::file://{base}/one/run")
        mp.spawn(two_ranks, (directory, f"tierfs::file://{base}/two/run", given.step_seconds), nprocs=2)
        results["two ranks"] = json.loads((base / "found.json").read_text())
        results["many steps"] = many_steps(base / "many", given.roots)
    aims.at_most("us a step without a save, one rank", results["one rank"]["mean us"], 50)
    for step_s, found in results["two ranks"].items():
        aims.at_most(f"share of the time, two ranks, steps of {step_s} s", found["share"], 0.001)
    aims.at_most(f"s for latest() among {given.roots} steps", results["many steps"]["latest s"], 1)
    aims.at_most(f"s for restore's search among {given.roots} steps", results["many steps"]["search s"], 1)
    results["aims"] = aims.found
    say(results, as_json=given.json)
    return 0 if all(aim["holds"] for aim in aims.found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
