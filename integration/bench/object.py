"""The object tier on S3 and its peers: chunks put, flushed and read, checkpoints saved and loaded, requests.

    python integration/bench/object.py [--bytes 2GiB] [--rounds 5] [--server ministack|nginx|URL ...]
        [--only PART ...] [--json]

Peers take turns in each round. Figures are medians of the rounds after one that warms up connections, slabs, the
arena's disk blocks, the flusher and the server's memory, as in a long-running job. Slabs take several files or saves
before the rounds. The servers are processes on this machine. ministack speaks S3, but slowly, and only tierfs makes
it check a checksum. nginx does not speak S3 and only takes chunks. A URL is used with the credentials in the
environment.

Chunks: objects of 16 MiB with incompressible content, new in each round. Each client sends 2, 4, 8 or 16 at once,
whichever was fastest before the rounds. "cpu" is processor seconds per GB, of the client's process or of the flusher.
"flush" is the path of tierfs's users: the time from closing a staged file until the flusher, a process of its own,
has put it into the object tier. "memcpy" is ``numpy.copyto`` between two warm buffers.

Checkpoints: at most 64 equal matrices of 32 MiB, with new content for each save by one process. Another process,
whose imports are done and whose target memory is warm, loads them. For tierfs it has an empty state directory, so
that no local tier holds anything. The loaded content is compared with the saved content. A proxy counts requests,
with those for leases and the like, in a separate run of at most 2 GiB. Needs about 14 times --bytes of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from aims import Aims
from aims import show as show_aims
from object_checkpoints import TORCH, Checkpoints
from object_moves import moves
from object_servers import REGION, Server, ministack, nginx, running
from tiers import SEED

from tierfs.units import parse_size

PARTS = ("chunks", "checkpoints", "requests")
REQUESTS_MAX = 70
SAID_MAX = 160


def server_at(name: str) -> AbstractContextManager[Server]:
    return {"ministack": ministack, "nginx": nginx}.get(name, lambda: running(name))()


def measured(server: Server, size: int, rounds: int, parts: list[str], root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "chunks" in parts:
        found["chunks"] = moves(server, size, rounds, root)
    if server.is_s3:
        checkpoints = Checkpoints(server, size, rounds, root)
        if "checkpoints" in parts:
            found["checkpoints"] = checkpoints.saves_and_loads()
        if "requests" in parts:
            found["requests"] = checkpoints.requests()
    return found


def aims(servers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = Aims()
    for server, parts in servers.items():
        if "chunks" in parts:
            rows = parts["chunks"]["rows"]
            for what in ("put", "get"):
                peers = {name: rows[name][what] for name in parts["chunks"]["at once"] if not name.startswith("tierfs")}
                best = min(peers, key=lambda name: peers[name])
                for name, row in rows.items():
                    if name.startswith("tierfs") and what in row:
                        speed = peers[best] / row[what]
                        found.at_least(f"{server}: {name}, {what}: times as fast as {best}", speed, 0.9)
        for what in ("save", "load"):
            rows = parts["checkpoints"]["rows"] if "checkpoints" in parts else {}
            for name in rows:
                if not name.startswith("tierfs"):
                    limit = 1.2 if name.startswith(TORCH) else 3.0
                    times = rows[name][what] / rows["tierfs"][what]
                    found.at_least(f"{server}: {what}, times as fast as {name}", times, limit)
        for step, requests in parts.get("requests", {}).get("per GiB", {}).items():
            wanted = "requests for chunks and manifests"
            found.at_most(f"{server}: {wanted} per GiB of a {step}", requests["chunks and manifests"], REQUESTS_MAX)
    return found.found


def cell(row: dict[str, float], what: str, size: int) -> str:
    """Format the seconds, the speed and, if known, the processor seconds per GB of one operation."""
    if what not in row:
        return 25 * " "
    used = f"{row[f'{what} cpu'] / size * 1e9:7.2f}" if f"{what} cpu" in row else 7 * " "
    return f"{row[what]:9.3f} {size / row[what] / 1e6:7.0f} {used}"


def show(report: dict[str, Any]) -> None:
    size = report["bytes"]
    print(f"{report['machine']}, {size / 2**20:.0f} MiB, {report['rounds']} rounds, seed {SEED}")
    for server, parts in report["servers"].items():
        for part, names in (("chunks", ("put", "get")), ("checkpoints", ("save", "load"))):
            if part in parts:
                used = ("cpu" if part == "chunks" else "").rjust(8)
                print(f"\n{f'{server}: {part}':50}" + "".join(f"{f'{name} s':>9} {'MB/s':>7}{used}" for name in names))
                widths = parts[part].get("at once", {})
                for name, row in parts[part]["rows"].items():
                    told = "".join(f", {count} {what}s at once" for what, count in widths.get(name, {}).items())
                    print(f"{name:50}{''.join(cell(row, what, size) for what in names)}{told}")
                for name, why in parts[part]["unable"].items():
                    print(f"left out: {name}: {why[:SAID_MAX]}")
        if "requests" in parts:
            print(f"\n{server}: requests for {parts['requests']['bytes'] / 2**20:.0f} MiB")
            for step, kinds in parts["requests"]["seen"].items():
                whole = parts["requests"]["per GiB"][step]["all"]
                print(
                    f"{step:30} {', '.join(f'{count} {kind}' for kind, count in kinds.items())}; all per GiB {whole:.1f}"
                )
            print(f"who loads counted {parts['requests']['counted by who loads']}")
    print()
    show_aims(report["aims"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="2GiB", help="bytes of the chunks, and of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--server", nargs="+", default=["ministack", "nginx"], help="servers to use: ministack, nginx or a URL"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    parser.add_argument("--directory", help="directory on the disk of the nvme tier")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size = parse_size(options.bytes)
    for name, value in (("AWS_ACCESS_KEY_ID", "any"), ("AWS_SECRET_ACCESS_KEY", "any"), ("AWS_REGION", REGION)):
        os.environ.setdefault(name, value)
    os.environ.setdefault("AWS_DEFAULT_REGION", os.environ["AWS_REGION"])
    report: dict[str, Any] = {
        "bytes": size,
        "rounds": options.rounds,
        "seed": SEED,
        "machine": {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "torch": torch.__version__},
        "servers": {},
    }
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=options.directory, ignore_cleanup_errors=True) as root:
        for name in options.server:
            directory = Path(root, str(len(report["servers"])))
            directory.mkdir()
            with server_at(name) as server:
                report["servers"][name] = measured(server, size, options.rounds, options.only, directory)
    report["aims"] = aims(report["servers"])
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)


if __name__ == "__main__":
    main()
