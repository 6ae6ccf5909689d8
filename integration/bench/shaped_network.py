"""A network of one's own whose loopback carries no more than it is told: Linux's token bucket (tc-tbf), for all connections together.

Needs iproute2 and util-linux, and root or the right to make user namespaces.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# Not less than a packet, which loopback makes as large as 64 KiB, and no more than some ms of a slow link.
_BURST_BYTES = 256 << 10
# Senders of this host wait for their turn rather than lose packets.
_QUEUE_BYTES = 256 << 20
_BITS = 8


def command(program: list[str | Path]) -> list[str]:
    """What runs a program in a network of its own, which goes when the last process in it ends."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--net", *user, "--", *map(str, program)]


def up() -> None:
    """Let there be a loopback. The process must be in a network of its own."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def limit(bytes_per_s: float | None) -> None:
    """Have the loopback carry so much from now on; ``None`` for all it can."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)  # there may be none
    if bytes_per_s is not None:
        bucket = [f"rate {int(bytes_per_s * _BITS)}bit", f"burst {_BURST_BYTES}", f"limit {_QUEUE_BYTES}"]
        words = " ".join(["tc qdisc add dev lo root tbf", *bucket]).split()
        subprocess.run(words, check=True)
