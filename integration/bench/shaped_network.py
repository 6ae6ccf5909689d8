"""A network namespace whose loopback is limited by Linux's token bucket (tc-tbf), all connections together.

Needs iproute2 and util-linux, and root or the right to create user namespaces.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# At least one packet, which is up to 64 KiB on loopback, and at most a few ms of a slow link.
_BURST_BYTES = 256 << 10
# Senders on this host wait for their turn and lose no packets.
_QUEUE_BYTES = 256 << 20
_BITS = 8


def command(program: list[str | Path]) -> list[str]:
    """Return the command that runs a program in a new network namespace, which ends with its last process."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--net", *user, "--", *map(str, program)]


def up() -> None:
    """Bring the loopback up. The process must be in a network namespace of its own."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def limit(bytes_per_s: float | None) -> None:
    """Limit the loopback from now on; ``None`` removes the limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)  # there may be none
    if bytes_per_s is not None:
        bucket = [f"rate {int(bytes_per_s * _BITS)}bit", f"burst {_BURST_BYTES}", f"limit {_QUEUE_BYTES}"]
        words = " ".join(["tc qdisc add dev lo root tbf", *bucket]).split()
        subprocess.run(words, check=True)
