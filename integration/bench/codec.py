"""Codecs on real training states: sizes and speeds.

    python integration/bench/snapshots.py DIRECTORY     # once, half an hour
    python integration/bench/codec.py DIRECTORY [--rounds 30] [--only PART ...] [--json]

Sizes: a state is saved as one safetensors file into an empty store with ``codecs="all"``, and then the same
state some steps later. A size is all bytes in the object tier over the bytes of the file. Every tensor is loaded
back from the object tier and compared bit for bit. zstd -3 and zipnn (needs ``zipnn``) compress the same bytes,
tensor by tensor. Of the second save they get only the tensors that changed.

Files: pairs of files as a hub keeps them go to tierfs, Xet (needs ``hf_xet``), zstd and zipnn as whole files. They
need no DIRECTORY (``codec.py --only files``); see `codec_files.py`.

Speeds: blocks of 1 MiB are encoded or decoded into warm memory, and hashed. There are more blocks than the caches
hold. Without DIRECTORY the blocks come from made-up states (``codec.py --only speed``). "memcpy" is
``numpy.copyto`` between two warm buffers of 256 MiB in the same rounds. Two threads share the same blocks. Two
processes, each with half of the blocks, show the most that two threads could gain. A round counts if two threads
speed up zstd's Huffman coder 1.8 times, before and after the round: then no other process used the cores. If too
few rounds pass, as on two hyperthreads of one core, all rounds count and the report says so.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import codec_files
import codec_sets
import codec_speed
import torch
from harness import Aims, machine, parser, say

PARTS = ("sets", "speed", "files")
SPEEDS = {"PLANE encode": 1.3, "DPLANE encode": 1.2, "PLANE decode": 2.5, "DPLANE decode": 1.8}
THREADS_GAIN = 1.6


def aims(report: dict[str, Any]) -> list[dict[str, Any]]:
    found = Aims()
    for one in codec_sets.SETS:
        saves = report["sets"].get(one.name, {})
        for save, limit in zip(("static", "delta"), one.limits, strict=True):
            if save in saves and limit is not None:
                of = "changed" if one.of_changed and save == "delta" else "raw"
                share = saves[save]["stored"] / saves[save][of]
                found.at_most(f"{title(one.name, saves, save)}: stored, of the {of} bytes", share, limit)
    for name, saves in report["sets"].items():
        for save in ("static", "delta"):
            for peer in ("zstd-3", "zipnn"):
                smaller = saves[save]["stored"] / saves[save][peer]
                found.at_most(f"{title(name, saves, save)}: stored, of {peer}'s", smaller, 1.0)
    rows = report["speed"].get("rows", {})
    for name, limit in SPEEDS.items() if rows else ():
        codec, way = name.split()
        row = rows[f"{codec} all {way}"]
        found.at_least(f"{name}: GB/s where memcpy makes 10", row["where memcpy makes 10"], limit)
        found.at_least(f"{name}: two threads over one", row["2 threads over 1"], THREADS_GAIN)
        both = report["speed"]["processes"][name]["over 2 threads"]
        found.at_least(f"{name}: two threads, of what two processes make", 1 / both, THREADS_GAIN / 2)
    return found.found


def title(name: str, saves: dict[str, Any], save: str) -> str:
    steps = f"{saves['later']} step{'s' * (saves['later'] > 1)} later"
    return f"{name}, {'first save' if save == 'static' else steps}"


def main() -> None:
    arguments = parser(__doc__, "directory for the stores")
    arguments.add_argument(
        "snapshots", type=Path, nargs="?", help="output of snapshots.py; without it, only the speeds of made-up states"
    )
    arguments.add_argument("--rounds", type=int, default=30, help="rounds of the speeds")
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    arguments.add_argument(
        "--set", nargs="+", choices=[one.name for one in codec_sets.SETS], default=[], help="run only these sets"
    )
    options = arguments.parse_args()
    if options.snapshots is None and "sets" in options.only:
        arguments.error("sizes need the states that snapshots.py trains; `--only speed files` does without")
    report: dict[str, Any] = {
        "rounds": options.rounds,
        "machine": machine(torch=torch.__version__),
        **{part: {} for part in PARTS},
    }
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=options.directory, ignore_cleanup_errors=True) as root:
        if "speed" in options.only:
            cases = codec_speed.cases(options.snapshots) if options.snapshots else codec_speed.made_up_cases()
            processes = codec_speed.of_processes(cases, options.rounds)
            report["speed"] = codec_speed.report(cases, options.rounds) | {"processes": processes}
        if "sets" in options.only:
            report["sets"] = codec_sets.report(options.snapshots, Path(root), options.set)
        if "files" in options.only:
            report["files"] = codec_files.report(Path(root))
    report["aims"] = aims(report)
    say(report, as_json=options.json)


if __name__ == "__main__":
    main()
