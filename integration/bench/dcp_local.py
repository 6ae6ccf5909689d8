"""Save and load through stock DCP on a local disk: tierfs, the plain directory writer, and the disk itself.

    python integration/bench/dcp_local.py [--mib 512] [--rounds 5] [--directory DIR] [--json]

The state is random float32 tensors in warm memory, new in each round, so nothing is deduplicated. Peers take turns,
and figures are medians. Each round has its own store and directory, deleted at its end. All peers flush to disk.
Loads come from the page cache. "limit" is one thread that writes and flushes, or reads, the same bytes in pieces of
16 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import tierfs

PIECE = 16 << 20
SEED = 1


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def write_limit(path: Path, size: int, piece: bytearray) -> None:
    with open(path, "wb", buffering=0) as file:
        file.writelines(itertools.repeat(piece, size // PIECE))
        os.fsync(file.fileno())


def read_limit(path: Path, piece: bytearray) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir=options.directory))
    size = options.mib << 20
    torch.manual_seed(SEED)
    count = 16
    state = {f"layer{index}": torch.empty(size // count // 4) for index in range(count)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    piece = bytearray(os.urandom(PIECE))
    seconds: dict[str, list[float]] = {}

    def note(name: str, function: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(timed(function))

    try:
        for number in range(options.rounds + 1):
            for tensor in state.values():
                tensor.uniform_()
            store, plain = root / f"store_{number}", root / f"plain_{number}"
            tierfs.init(f"file://{store}")
            url = f"tierfs::file://{store}/step"
            note("save limit", partial(write_limit, root / "limit", size, piece))
            note("save plain", partial(dcp.save, state, checkpoint_id=str(plain)))
            note("save tierfs", partial(dcp.save, state, checkpoint_id=url))
            note("save tierfs again", partial(dcp.save, state, checkpoint_id=f"{url}_again"))
            note("load limit", partial(read_limit, root / "limit", piece))
            note("load plain", partial(dcp.load, loaded, checkpoint_id=str(plain)))
            note("load tierfs", partial(dcp.load, loaded, checkpoint_id=url))
            assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
            if number == 0:
                seconds.clear()  # the first round warms up
            # Delete both, so that both write into used memory and disk blocks. New ones are far slower here.
            shutil.rmtree(plain)
            shutil.rmtree(store)
    finally:
        shutil.rmtree(root)
    rows = [
        {"what": name, "seconds": statistics.median(values), "mb_per_s": size / statistics.median(values) / 1e6}
        for name, values in seconds.items()
    ]
    by_name = {row["what"]: row["seconds"] for row in rows}
    for row in rows:
        verb = str(row["what"]).split()[0]
        row["of_limit"] = by_name[f"{verb} limit"] / row["seconds"]
        row["of_plain"] = by_name[f"{verb} plain"] / row["seconds"]
    if options.json:
        print(json.dumps({"mib": options.mib, "rounds": options.rounds, "seed": SEED, "rows": rows}, indent=1))
        return
    print(f"{options.mib} MiB, {options.rounds} rounds, seed {SEED}, {os.cpu_count()} cores")
    print(f"{'':20} {'s':>7} {'MB/s':>7} {'of limit':>9} {'of plain':>9}")
    for row in rows:
        print(
            f"{row['what']:20} {row['seconds']:7.2f} {row['mb_per_s']:7.0f} {row['of_limit']:9.2f} {row['of_plain']:9.2f}"
        )


if __name__ == "__main__":
    main()
