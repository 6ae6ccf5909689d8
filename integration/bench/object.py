"""The object tier on S3 and its peers: chunks put, flushed and read, checkpoints saved and loaded, requests.

    python integration/bench/object.py [--bytes 2GiB] [--rounds 5] [--server ministack|nginx|URL ...]
        [--only PART ...] [--json]

Peers take turns in each round. Figures are medians of the rounds after one that warms up connections, slabs, the
disk blocks, the flusher and the server's memory, as in a long-running job. Slabs take several files or saves
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

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from harness import SEED, Aims, machine, parser, say
from object_checkpoints import TORCH, Checkpoints
from object_moves import moves
from object_servers import REGION, Server, ministack, nginx, running

from tierfs.units import parse_size

PARTS = ("chunks", "checkpoints", "requests")
REQUESTS_MAX = 70


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


def main() -> None:
    arguments = parser(__doc__, "directory on the disk of the nvme tier")
    arguments.add_argument("--bytes", default="2GiB", help="bytes of the chunks, and of the state")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument(
        "--server", nargs="+", default=["ministack", "nginx"], help="servers to use: ministack, nginx or a URL"
    )
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    options = arguments.parse_args()
    size = parse_size(options.bytes)
    for name, value in (("AWS_ACCESS_KEY_ID", "any"), ("AWS_SECRET_ACCESS_KEY", "any"), ("AWS_REGION", REGION)):
        os.environ.setdefault(name, value)
    os.environ.setdefault("AWS_DEFAULT_REGION", os.environ["AWS_REGION"])
    report: dict[str, Any] = {
        "bytes": size,
        "rounds": options.rounds,
        "seed": SEED,
        "machine": machine(torch=torch.__version__),
        "servers": {},
    }
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=options.directory, ignore_cleanup_errors=True) as root:
        for name in options.server:
            directory = Path(root, str(len(report["servers"])))
            directory.mkdir()
            with server_at(name) as server:
                report["servers"][name] = measured(server, size, options.rounds, options.only, directory)
    report["aims"] = aims(report["servers"])
    say(report, as_json=options.json)


if __name__ == "__main__":
    main()
