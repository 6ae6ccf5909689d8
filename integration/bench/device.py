"""The device tier: blocked training, the cost of a save to the next steps, kernels, loads and rollbacks.

    python integration/bench/device.py [--bytes 20GB] [--budget 200] [--directory DIR] [--json FILE] [--dry]

Needs a GPU. Each figure stands beside its limit. The state is a decoder of 24 layers (293 parameters) with AdamW's
two moments, trained on random tokens. A training row saves behind a step that is still queued, and 20 steps follow.
The time lost is the time of these 21 steps beyond the mean of 21 undisturbed steps before and after.

Stock is ``dcp.async_save`` with pinned and shared memory and a kept stager. Training waits for its copies before the
optimizer's step, as torch asks. Both sides write to the same directory while training goes on: stock from a thread,
tierfs's flusher from a process. Between saves, the bench waits for the written files and deletes them.

Rows run in order of importance, in two processes. The report lists rows that do not fit the budget. The state
shrinks if memory or time is short, and the report says so. Figures are medians of --rounds after a warm-up.

Needs 4.6 times --bytes of GPU memory (3.6 times with one generation). Of host memory it needs 2.3 times --bytes for
the ram tier, once for stock, and once for files, unless a disk holds the files.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

SMALL_SHARE = 0.35  # most of the budget that the quick rows may take
PARTS = ("small", "big")
SHM_STATES = 3.5  # 2.25 for the ram tier and 1 for stock, rounded up
STATES_WRITTEN = 16  # by all rows
WRITING_SHARE = 0.8  # of the time at most; several threads write faster than the one that `_disk` times
SIZE_MIN = 64 << 20
SPARE_S = 8.0  # to stop flushers and delete files
SEED = 1


def main() -> int:
    """Measure and print. The status is 0 even if rows failed; the table shows them."""
    options = _options()
    if options.part is not None:
        return _part(options)
    import torch

    if not options.dry and not torch.cuda.is_available():
        print("no GPU is here: nothing was measured (--dry runs the bench itself on host memory)")
        return 0
    found: dict[str, Any] = {}
    begin = time.time()
    end = begin + options.budget
    shared = os.environ.get("TIERFS_SHM_DIR") or "/dev/shm"
    made = partial(tempfile.TemporaryDirectory, prefix="tierfs-device-", ignore_cleanup_errors=True)
    with made(dir=options.directory) as root, made(dir=shared) as os.environ["TIERFS_SHM_DIR"]:
        for part in options.parts:
            share = begin + options.budget * SMALL_SHARE if part == "small" and len(options.parts) > 1 else end
            # Beside the report, each row is there as soon as it is measured, whatever ends the bench.
            path = Path(f"{options.json}.{part}") if options.json else Path(root) / f"{part}.json"
            found[part] = _child(options, part, path, Path(root) / part, share)
            if options.json:
                Path(options.json).write_text(json.dumps({"parts": found}, indent=1))
    report = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "seed": SEED,
        "dry": options.dry,
        "wall_s": round(time.time() - begin, 1),
        "flusher and stock's writer": "both write to --directory while training goes on",
        "parts": found,
        "aims": [],
    }
    try:
        report["aims"] = aims(found)
    except Exception as error:  # keep the measured values
        report["problem"] = repr(error)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))
    show(report)
    return 0


def _options() -> argparse.Namespace:
    from tierfs.units import parse_size

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default=None, help="size of the state (default: 20GB, with --dry 12MB)")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=None, help="rounds that count (default: 2, with --dry 1)")
    parser.add_argument(
        "--steps", type=int, default=None, help="training steps after a save (default: 20, with --dry 3)"
    )
    parser.add_argument("--directory", help="directory for the stores and stock's files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[], help="rows to run besides limits and training")
    parser.add_argument("--dry", action="store_true", help="run the bench itself on host memory, with tiny sizes")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.dry else 2)
    options.steps = options.steps or (3 if options.dry else 20)
    options.size = parse_size(options.bytes or ("12MB" if options.dry else "20GB"))
    return options


def _child(options: argparse.Namespace, part: str, path: Path, root: Path, end: float) -> dict[str, Any]:
    """Run a part in a process of its own, so that a broken kernel cannot affect the other part."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--end", end, "--out", path, "--root", root]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if part == "small" else dict(os.environ)
    process = subprocess.Popen(list(map(str, command)), env=environment)
    try:
        status: int | str = process.wait(timeout=max(end - time.time(), 1.0) + SPARE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = f"killed at the end of its time: {process.wait()}"
        for store in root.glob("*/store"):
            _stop_flusher(store)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        found = {"rows": {}, "problem": repr(error)}
    return {**found, "status": status}


def _stop_flusher(store: Path) -> None:
    """Stop the flusher of a killed part. It would go on running and keep its memory."""
    environment = {**os.environ, "TIERFS_STATE_DIR": str(store.parent / "state")}
    command = [sys.executable, "-m", "tierfs.cli", "flusher", "stop", f"file://{store}"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, check=False, capture_output=True, timeout=10)


def _part(options: argparse.Namespace) -> int:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    from device_budget import Budget, Rows
    from device_card import Card, DryCard, machine

    card = DryCard() if options.dry else Card()
    root = Path(options.root)
    root.mkdir()
    budget = Budget(options.end)
    facts: dict[str, Any] = {"machine": {**card.describe(), **machine()}, "directory": _disk(root, dry=options.dry)}
    if options.part == "big":
        _fit(options, facts, budget.left())
        import device_big as part

        measured: Any = part.Big(card, root, options, budget)
    else:
        import device_small as part

        measured = part.Small(card, root, dry=options.dry)
    rows = Rows(Path(options.out), budget, facts)
    rows.write()
    for name, measure, at_most_s, at_least_s in part.rows_of(measured):
        if not options.only or name in {"limits", "training", *options.only}:
            rows.run(name, measure, at_most_s=at_most_s, at_least_s=0 if options.dry else at_least_s)
            measured.limits = measured.limits or rows.found["rows"].get("limits", {})
    closing = threading.Thread(target=getattr(measured, "close", lambda: None), daemon=True)
    closing.start()
    closing.join(SPARE_S)
    shutil.rmtree(root, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # does not wait for a thread that hangs


def _fit(options: argparse.Namespace, facts: dict[str, Any], left_s: float) -> None:
    """Shrink the state to fit the GPU, shared and host memory, and the time to write files."""
    machine = facts["machine"]
    shared = Path(os.environ.get("TIERFS_SHM_DIR") or "/dev/shm")
    rooms = {
        f"of {shared}": shutil.disk_usage(shared).free / SHM_STATES,
        "of host memory": machine["MemAvailable"] / (SHM_STATES + 1.2),
        "of the GPU": (machine["device_bytes"] - (14 << 30)) / 3.0,
        "of time to write files": WRITING_SHARE * left_s * facts["directory"]["write_bytes_per_s"] / STATES_WRITTEN,
    }
    what, room = min(rooms.items(), key=lambda one: one[1])
    if room < options.size:
        facts["shrunk"] = f"from {options.size} to {int(room)} bytes, for want {what}"
        print(f"the state shrinks {facts['shrunk']}", flush=True)
        options.size = max(int(room), SIZE_MIN)
    facts["bytes"] = options.size


def _disk(root: Path, *, dry: bool) -> dict[str, Any]:
    """Return the filesystem's kind, its free bytes, and the speed of one thread that writes and flushes."""
    piece, count = os.urandom(1 << 20) * 16, 2 if dry else 64
    begin = time.perf_counter()
    with open(root / "limit", "wb", buffering=0) as file:
        file.writelines([piece] * count)
        os.fsync(file.fileno())
    took = time.perf_counter() - begin
    (root / "limit").unlink()
    kind = subprocess.run(["stat", "-f", "-c", "%T", root], capture_output=True, text=True, check=False).stdout.strip()
    return {"filesystem": kind, "free": shutil.disk_usage(root).free, "write_bytes_per_s": len(piece) * count / took}


def aims(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the aims with measured values. Rows without a value are left out."""
    from harness import Aims

    found = Aims()
    small, big = (parts.get(part, {}).get("rows", {}) for part in PARTS)

    def measured(rows: dict[str, Any], name: str, key: str = "value") -> float | None:
        value = rows.get(name, {}).get(key)
        return float(value) if isinstance(value, (int, float)) else None

    def at_least(what: str, value: float | None, limit: float) -> None:
        if value is not None:
            found.at_least(what, value, limit)

    def at_most(what: str, value: float | None, limit: float) -> None:
        if value is not None:
            found.at_most(what, value, limit)

    at_least("blocked, to the device tier, of D2D (behind a queued step)", measured(big, "device"), 0.8)
    at_least("blocked, to the device tier, of D2D (idle GPU, whole call)", measured(big, "device", "of_d2d_idle"), 0.8)
    at_least("blocked, to ram, of pinned D2H", measured(big, "ram"), 0.9)
    stock, device, lazy = (measured(big, name, "lost_s") for name in ("stock", "device", "lazy"))
    if stock is not None:
        if device is not None:
            # A time lost that is within the noise of the windows may be negative. One millisecond is the resolution.
            at_least("time lost, stock's over tierfs device's", stock / max(device, 1e-3), 15)
        if lazy is not None:
            at_most("time lost, tierfs lazy's over stock's", max(lazy, 0.0) / max(stock, 1e-3), 0.5)
    digest, read = measured(small, "digest"), measured(small, "limits", "read")
    at_least("digest kernel, of the read bandwidth", digest / read if digest and read else None, 0.7)
    at_most(
        "second save, 90 % unchanged: D2H bytes of the first's", measured(big, "second save", "bytes_of_first"), 0.2
    )
    at_most(
        "second save, 90 % unchanged: drain time of the first's", measured(big, "second save", "time_of_first"), 0.2
    )
    at_least("load from ram to the GPU, of pinned H2D", measured(big, "load"), 0.8)
    at_least("rollback from the device tier, of D2D", measured(big, "rollback"), 0.5)
    identity = small.get("identity", {}).get("value")
    at_least("bit-identical, and of before the step (1: yes)", None if identity is None else float(identity), 1)
    growth = small.get("flat", {}).get("growth")
    if growth:
        at_most("RssAnon over 40 saves, MiB more", growth["RssAnon"] / (1 << 20), 16)
        at_most("device memory over 40 saves, MiB more", growth["allocated"] / (1 << 20), 0)
        at_most("registered over 40 saves, MiB more", growth.get("registered_bytes", 0) / (1 << 20), 0)
    return found.found


def show(report: dict[str, Any]) -> None:
    from harness import show as show_lines

    for part, found in report["parts"].items():
        rows = found.get("rows", {})
        about = {key: found[key] for key in ("bytes", "shrunk", "status", "problem") if key in found}
        print(f"\n{part}: {json.dumps(about)}")
        for name, row in rows.items():
            if "error" in row:
                print(f"{name:16} FAILED: {row['error'].strip().splitlines()[-1][:160]}")
            elif "not_reached" in row:
                print(f"{name:16} not reached: {row['not_reached']}")
        limits = rows.get("limits", {})
        speeds = {key: f"{limits[key] / 1e9:.1f}" for key in ("d2d", "read", "d2h", "h2d") if key in limits}
        print(f"limits, GB/s: {speeds}")
        for name, row in rows.items():
            shown = {key: _round(row[key]) for key in SHOWN if key in row}
            if shown:
                print(f"{name:16} " + ", ".join(f"{key} {value}" for key, value in shown.items()))
        for name in ("load", "rollback"):
            phases = rows.get(name, {}).get("phases", {})
            if phases:
                print(f"{name}, ms: " + ", ".join(f"{phase} {1e3 * took:.1f}" for phase, took in phases.items()))
        if isinstance(rows.get("flat", {}).get("growth"), dict):
            print(f"{'flat':16} growth {rows['flat']['growth']}")
        digests = {
            key: f"{value / 1e9:.1f}"
            for key, value in rows.get("digest", {}).items()
            if isinstance(value, float) and key not in {"row_s", "value"}
        }
        if digests:
            print(f"digest, GB/s: {digests}")
    machine = next((found["machine"] for found in report["parts"].values() if "machine" in found), {})
    print(
        f"\n{machine.get('card')}, driver {machine.get('driver')}, torch {machine.get('torch')}, {report['date']}, "
        f"{report['wall_s']} s{', DRY: the figures mean nothing' if report['dry'] else ''}"
    )
    show_lines({"aims": report["aims"]})


SHOWN = (
    "step_s",
    "bytes",
    "tensors",
    "rounds",
    "lost_s",
    "base_s",
    "blocked_stream_s",
    "blocked_s",
    "call_s",
    "stage_s",
    "queued_s",
    "idle_s",
    "staged_s",
    "saved_s",
    "d2d_s",
    "d2h_s",
    "h2d_s",
    "d2h_of_pinned",
    "d2h_bytes",
    "drain_s",
    "settle_s",
    "first_s",
    "seconds",
    "device_bytes",
    "same",
    "generations",
    "row_s",
)


def _round(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
