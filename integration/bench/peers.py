"""How fast a save reaches ``peer``, and how soon a lost host's save is in the object tier.

    python integration/bench/peers.py [--bytes 1GiB] [--rounds 3] [--json]

Two hosts of one machine, connected by its loopback: each has a state directory and a flusher process. Nothing but the
membership goes to the object tier, because the owner's bandwidth is 1 byte per second. Each round has three rows:

- *save*: from ``staged`` to ``peer`` of one file of new bytes, without an nvme tier.
- *changed*: the same of the file with one chunk in twenty changed. ``sent`` is the bytes that travelled.
- *socket*: the same bytes from one process to another over TLS 1.3, each block hashed on both sides. The processes have
  the nice value of a flusher.

- *recover*: the file is read from the holder by a host that has nothing, before it is published.

At the end the owner is lost, and *adopted* is the time from then until its last file is in the object tier. Before all
this, four hosts load one file of a bucket at once, which gives the bytes that they read from it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import SEED, Aims, Rows, machine, parser, say

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]
from servers import ministack
from servers.server import free_ports
from support.peer_hosts import PeerHost, bare, until

import tierfs
from tierfs import digest
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind
from tierfs.flusher.priority import NICER
from tierfs.peers.settings import Identity
from tierfs.peers.wire import accept, dial, listen
from tierfs.units import parse_size

LEASE_S = 10
WAIT_S = 600


def receive(directory: Path, trusted: bytes, port: int, size: int, answer: Any) -> None:
    """Receive ``size`` bytes, hash them, and say when the last one is there."""
    os.nice(NICER)
    listener = listen("127.0.0.1", port)
    answer.send(None)
    connection = accept(listener.accept()[0], Identity(directory).context([trusted], server=True), WAIT_S)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for _ in range(0, size, CHUNK_BYTES):
        connection.read_into(buffer, lambda piece: digest.hash_bytes(DigestKind.XXH3_128, piece))
    connection.answer({})


def socket_seconds(base: Path, source: np.ndarray, port: int) -> float:
    """Send the bytes over TLS, one stream, hashed on both sides. Return the seconds."""
    directories = [base / name for name in ("sender", "receiver")]
    for directory in directories:
        directory.mkdir(mode=0o700, exist_ok=True)
    sender, receiver = map(Identity, directories)
    ours, theirs = multiprocessing.Pipe()
    arguments = (directories[1], sender.certificate, port, len(source), theirs)
    process = multiprocessing.get_context("fork").Process(target=receive, args=arguments)
    process.start()
    ours.recv()
    connection = dial("127.0.0.1", port, sender.context([receiver.certificate], server=False), WAIT_S)
    begin = time.perf_counter()
    view = memoryview(source)
    for at in range(0, len(view), BLOCK_BYTES):
        block = view[at : at + BLOCK_BYTES]
        digest.hash_bytes(DigestKind.XXH3_128, block)
        connection._sock.sendall(block)  # a frame has a limit, and this is one stream of bytes
    connection.receive()
    seconds = time.perf_counter() - begin
    connection.close()
    process.join()
    return seconds


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--bytes", default="1GiB")
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    size = parse_size(options.bytes)
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=options.directory) as name:
        base = Path(name)
        os.environ["TIERFS_STATE_DIR"] = str(base / "bare")
        url = f"file://{base}/store"
        tierfs.init(url, lease_s=LEASE_S)
        room = {
            "ram": str((options.rounds + 1) * 2 * size + (64 << 20)),
            "nvme": "0",
            "peer_ram": str((options.rounds + 2) * 2 * size + (64 << 20)),
        }
        share = bucket_share(base, min(size, 128 << 20))
        owner = PeerHost(base, "owner", url, *free_ports(1), bandwidth=1, **room)
        holder = PeerHost(base, "holder", url, *free_ports(1), **room)
        empty = PeerHost(base, "empty", url, *free_ports(1), **{**room, "peer_ram": "0", "peer_nvme": "0"})
        try:
            report = measure(base, owner.start(), holder.start(), empty, size, options.rounds, share)
        finally:
            for host in (owner, holder, empty):
                host.close()
    say(report, as_json=options.json)
    return 0 if all(aim["holds"] for aim in report["aims"]) else 1


def bucket_share(base: Path, size: int) -> float:
    """Load one file on four hosts at once. Return the bytes that they read from the bucket, of the file."""
    with ministack.running() as server, contextlib.ExitStack() as ends:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.port}"
        os.environ["AWS_ACCESS_KEY_ID"] = server.options["key"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = server.options["secret"]
        url = f"s3://{server.new_root()}"
        tierfs.init(url, lease_s=LEASE_S)
        there, store = bare(url)
        data = np.random.default_rng(SEED).bytes(size)
        there.pipe_file(f"{store}/run/x", data)
        room = {"ram": str(size + (64 << 20)), "nvme": "0", "peer_nvme": "0", "peer_ram": str(size)}
        hosts = [PeerHost(base, f"loader{number}", url, *free_ports(1), **room) for number in range(4)]
        for host in hosts:
            ends.callback(host.close)
            host.start()
        opened = [host.open(peer_share=1) for host in hosts]
        for fs, root in opened:
            until(lambda fs=fs, root=root: fs.status(root)["peers"]["live"] == len(hosts) - 1, WAIT_S)
        with ThreadPoolExecutor(len(hosts)) as threads:
            assert all(threads.map(lambda each: each[0].cat_file(f"{each[1]}/run/x") == data, opened))
        counters = [fs.status(root)["counters"] for fs, root in opened]
    names = ("flusher_peer_brought_bytes", "process_object_read_bytes")
    return sum(each.get(name, 0) for each in counters for name in names) / size


def recover(empty: PeerHost, path: str, source: np.ndarray) -> float:
    """Read a file that only the holder has on a host that has nothing. Return the seconds."""
    fs, root = empty.open()
    found = np.zeros_like(source)
    assert fs.exists(f"{root}/{path}")  # the hosts know each other then
    begin = time.perf_counter()
    with fs.open(f"{root}/{path}", "rb") as file:
        assert file.readinto(memoryview(found)) == len(source)
    seconds = time.perf_counter() - begin
    assert np.array_equal(found, source)
    return seconds


def measure(
    base: Path, owner: PeerHost, holder: PeerHost, empty: PeerHost, size: int, rounds: int, share: float
) -> dict[str, Any]:
    generator, rows, aims = np.random.default_rng(SEED), Rows(), Aims()
    fs, root = owner.open(ack="staged")
    source = np.ones(size, np.uint8)

    def sent() -> int:
        return int(owner.status()["counters"].get("flusher_peer_sent_bytes", 0))

    def save(row: str, path: str) -> None:
        before = sent()
        with fs.open(f"{root}/{path}", "wb") as file:
            file.write(source)
        begin = time.perf_counter()
        fs.wait(f"{root}/{path}", "peer", timeout=WAIT_S)
        seconds = time.perf_counter() - begin
        rows.note(row, seconds=seconds, rate=size / seconds, sent=sent() - before)

    fs.pipe_file(f"{root}/warm", os.urandom(1 << 20))
    fs.wait(f"{root}/warm", "peer", timeout=WAIT_S)
    for number in range(rounds):
        source[:] = generator.integers(0, 256, size, dtype=np.uint8)
        # The draft of an earlier round stays pending, so each round has a file of its own.
        save("save", f"run/{number}")
        for at in range(0, size, 20 * CHUNK_BYTES):
            source[at] ^= 1
        save("changed", f"run/{number}-changed")
        if not number:
            empty.start()
        rows.note(
            "recover", seconds=(took := recover(empty, f"run/{number}-changed", source)), rate=size / took, sent=0
        )
        rows.note("socket", seconds=(took := socket_seconds(base, source, *free_ports(1))), rate=size / took, sent=size)
        for path in (f"run/{number}", f"run/{number}-changed"):
            fs.rm_file(f"{root}/{path}")
    last = f"run/{rounds - 1}-last"
    source[: min(size, 64 << 20)] ^= 3
    fs.pipe_file(f"{root}/{last}", source[: min(size, 64 << 20)].tobytes())
    fs.wait(f"{root}/{last}", "peer", timeout=WAIT_S)
    owner.lose()
    begin = time.perf_counter()
    there, store = bare(holder.url)
    until(partial(there.exists, f"{store}/{last}"), WAIT_S)
    adopted = time.perf_counter() - begin
    found = rows.medians()
    aims.at_least("staged to peer, of a TLS socket copy", 1 / rows.ratio("seconds", "save", "socket"), 0.8)
    aims.at_most("recovery on an empty host, of a TLS socket copy", rows.ratio("seconds", "recover", "socket"), 1.2)
    aims.at_most("bytes that four hosts read from the bucket, of the file", share, 1.1)
    changed = min(-(-size // (20 * CHUNK_BYTES)) * CHUNK_BYTES, size)
    aims.at_most("bytes sent, of the chunks that changed", found["changed"]["sent"] / changed, 1.05)
    aims.at_most("seconds from the loss to the object tier, beyond the lease", adopted - LEASE_S, 5)
    return {
        "machine": machine(),
        "bytes": size,
        "rounds": rounds,
        "rows": found,
        "adopted_s": adopted,
        "aims": aims.found,
    }


if __name__ == "__main__":
    sys.exit(main())
