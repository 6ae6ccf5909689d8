"""The GPU that `device.py` measures, and a stand-in in host memory for ``--dry``."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierfs.device import accelerator as accelerators
from tierfs.device.kernel_launch import function, hash_blocks, launch

READ_KERNEL = Path(__file__).with_name("device_read.cu")
READ_THREADS = 256
READ_BLOCKS = 16  # for each multiprocessor


class Card:
    """One CUDA device. Times are seconds of CUDA events unless a method says otherwise."""

    is_real = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def accelerator(self) -> Any:
        """tierfs's object for the card."""
        return accelerators.accelerator_of(self.empty(1))

    def describe(self) -> dict[str, Any]:
        free, total = torch.cuda.mem_get_info()
        found = {"card": torch.cuda.get_device_name(), "device_bytes": total, "device_free_bytes": free}
        query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current"]
        try:
            said = subprocess.run([*query, "--format=csv,noheader"], check=True, capture_output=True, text=True)
            found["driver"], found["pcie"] = said.stdout.strip().split(", ", 1)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            found["driver"] = f"unknown: {error}"
        return found

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stamp(self) -> Any:
        """Record a point in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Wait for the second stamp, and return the seconds between the two."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; only `DryCard` has to register it."""
        return tensor

    def empty(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    def noise(self, length: int) -> torch.Tensor:
        """Return random bytes. Zeros could be faster than real data."""
        return torch.randint(256, (length,), dtype=torch.uint8, device=self.device)

    def pinned(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, pin_memory=True).fill_(1)

    def read(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Queue a kernel that reads all of ``data``."""
        grid = READ_BLOCKS * self._processors
        launch(
            function("read_all", READ_KERNEL),
            grid,
            READ_THREADS,
            (data, np.uint64(data.numel() // 16), out),
            device=data.device,
        )

    def hash(self, addresses: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> torch.Tensor:
        return hash_blocks(addresses, lengths, self.device)

    def memory(self) -> dict[str, int]:
        free, _ = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": free,
        }

    def release(self) -> None:
        """Return unused memory to the driver."""
        torch.cuda.empty_cache()


class DryCard(Card):
    """Host memory that tierfs treats as GPU memory, by the tests' `FakeDevice`. Its figures mean nothing."""

    is_real = False

    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
        from support.fake_device import FakeDevice

        self.device = torch.device("cpu")
        self._fake = FakeDevice(memory=1 << 40)
        accelerators.register_accelerator(self._fake)

    @property
    def accelerator(self) -> Any:
        return self._fake

    def describe(self) -> dict[str, Any]:
        return {"card": "dry run on host memory", "device_bytes": 1 << 40, "driver": "none"}

    def synchronize(self) -> None:
        self._fake.synchronize()

    def stamp(self) -> Any:
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make tierfs treat a tensor as GPU memory."""
        return self._fake.own(tensor) if not self._fake.owns(tensor) else tensor

    def empty(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8)

    def noise(self, length: int) -> torch.Tensor:
        return torch.randint(256, (length,), dtype=torch.uint8)

    def pinned(self, length: int) -> torch.Tensor:
        return torch.ones(length, dtype=torch.uint8)

    def read(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data.view(torch.int32).sum())

    def hash(self, addresses: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> torch.Tensor:
        digests = self._fake.hash(self._fake.current(), addresses, lengths)()
        return torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 16)

    def memory(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": 0, "free": 0}

    def release(self) -> None:
        pass


def seconds(card: Card, function: Callable[[], object], rounds: int = 7, each: int = 1) -> float:
    """Return the median seconds of a call on the card after a warm-up. Each round makes ``each`` calls."""
    function()
    found = []
    for _ in range(rounds):
        card.synchronize()
        begin = card.stamp()
        for _ in range(each):
            function()
        found.append(card.between(begin, card.stamp()) / each)
    return statistics.median(found)


def limits(card: Card, size: int) -> dict[str, Any]:
    """Return the card's limits in bytes per second. A device-to-device copy counts both bytes read and written."""
    found = _limits(card, -(-size // 4096) * 4096)
    card.release()
    if card.is_real and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
    return found


def _limits(card: Card, length: int) -> dict[str, Any]:
    data, other = card.noise(length), card.empty(length)
    found: dict[str, Any] = {"bytes": length}
    took = seconds(card, lambda: other.copy_(data))
    found["d2d"] = 2 * length / took
    found["d2d_s_per_byte"] = took / length
    try:
        out = torch.zeros(1, dtype=torch.int32, device=card.device)
        found["read"] = length / seconds(card, lambda: card.read(data, out))
    except Exception as error:
        found["read_error"] = repr(error)
    host = card.pinned(max(length // 2, 1 << 20))
    there = data[: host.numel()]
    found["d2h"] = host.numel() / seconds(card, lambda: host.copy_(there, non_blocking=True), 5)
    found["h2d"] = host.numel() / seconds(card, lambda: there.copy_(host, non_blocking=True), 5)
    return found


def machine() -> dict[str, Any]:
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = {
            name: int(kib) << 10
            for name, kib in re.findall(r"^(MemTotal|MemAvailable): +(\d+)", file.read(), re.MULTILINE)
        }
    shm = os.statvfs("/dev/shm")
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "shm_bytes": shm.f_frsize * shm.f_bavail,
        **memory,
    }
