"""Codecs on real training states: sizes, speeds, and the time of a flush over a limited link.

    python integration/bench/snapshots.py DIRECTORY     # once, half an hour
    python integration/bench/codec.py DIRECTORY [--rounds 30] [--link-rounds 5] [--only PART ...] [--json]
        [--plot FILE.png]

Sizes: a state is saved as one safetensors file into an empty store with ``codecs="all"``, and then the same
state some steps later. A size is all bytes in the object tier over the bytes of the file. Every tensor is loaded
back from the object tier and compared bit for bit. zstd -3 and zipnn (needs ``zipnn``) compress the same bytes,
tensor by tensor. Of the second save they get only the tensors that changed.

Speeds: blocks of 1 MiB are encoded or decoded into warm memory, and hashed. There are more blocks than the caches
hold. Without DIRECTORY the blocks come from made-up states (``codec.py --only speed``). "memcpy" is
``numpy.copyto`` between two warm buffers of 256 MiB in the same rounds. Two threads share the same blocks. Two
processes, each with half of the blocks, show the most that two threads could gain. A round counts if two threads
speed up zstd's Huffman coder 1.8 times, before and after the round: then no other process used the cores. If too
few rounds pass, as on two hyperthreads of one core, all rounds count and the report says so.

Links: several late states are staged as one. The time runs from the closed file until the flusher, a process of
its own, has put the file into the object tier. Rounds alternate between codecs and ``codecs="off"``. The server is
nginx on tmpfs (``apt-get install nginx-light``). The link is a loopback that Linux's token bucket limits (iproute2;
root, or user namespaces). The first round of each limit does not count. Needs about ten times the states' bytes of
memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import codec_links
import codec_processes
import codec_sets
import codec_speed
import torch
from aims import Aims
from aims import show as show_aims
from codec_plot import plot

PARTS = ("sets", "speed", "links")
SPEEDS = {"PLANE encode": 1.3, "DPLANE encode": 1.2, "PLANE decode": 2.5, "DPLANE decode": 1.8}
THREADS_GAIN = 1.6
SLOW_LINK = "200"
SLOW_LINK_GAIN = 1.35
NEVER_SLOWER = 0.97  # two equal flushes differ by this much


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
    for limit, ways in report["links"].get("rows", {}).items():
        for way in ("file", "checkpoint"):
            gain = ways[f"{way}, raw"]["seconds"] / ways[way]["seconds"]
            least = SLOW_LINK_GAIN if limit == SLOW_LINK else NEVER_SLOWER
            found.at_least(f"flush of a {way} over a link of {limit} MB/s, times as fast as raw", gain, least)
    return found.found


def title(name: str, saves: dict[str, Any], save: str) -> str:
    steps = f"{saves['later']} step{'s' * (saves['later'] > 1)} later"
    return f"{name}, {'first save' if save == 'static' else steps}"


def show(report: dict[str, Any]) -> None:
    print(f"{report['machine']}, {report['rounds']} rounds, of links {report['link rounds']}")
    if report["sets"]:
        peers = ("zstd-3", "zipnn", "zstd-3 patch-from")
        heads = "".join(f" {head:>8}" for head in ("raw MiB", "changed", "tierfs", *peers))
        print(f"\n{'stored / raw':45}{heads}")
        for name, saves in report["sets"].items():
            for save in ("static", "delta"):
                row = saves[save]
                shares = "".join(f" {row[peer] / row['raw']:8.4f}" for peer in ("stored", *peers) if peer in row)
                mib = "".join(f" {row[key] / 2**20:8.1f}" for key in ("raw", "changed"))
                print(f"{title(name, saves, save):45}{mib}{shares}")
    if report["speed"]:
        speed = report["speed"]
        gain = speed["Huffman coder, 2 threads over 1"]
        print(f"\nmemcpy {speed['memcpy']:.1f} GB/s; two threads make {gain:.2f} of a Huffman coder, in", end=" ")
        print(f"{speed['quiet rounds']} of {speed['rounds']} rounds nearly two")
        print(
            f"{'one thread, digest included':28} {'GB/s':>6} {'where memcpy makes 10':>22} {'2 threads / 1':>14} {'ratio':>6}"
        )
        for name, row in speed["rows"].items():
            ratio = speed["ratio"].get(name.rpartition(" ")[0])
            print(
                f"{name:28} {row['GB/s']:6.2f} {row['where memcpy makes 10']:22.2f} {row['2 threads over 1']:14.2f}"
                + ("" if ratio is None else f" {ratio:6.3f}")
            )
        for name, row in speed["processes"].items():
            print(
                f"{name}: two processes {row['over 1']:.2f} times as fast as one, and {row['over 2 threads']:.2f} times as two threads"
            )
    if report["links"]:
        what = f"flush of {report['links']['bytes'] / 2**20:.0f} MiB"
        print(f"\n{what:20} way             seconds    MB/s  cpu s  stored")
        for limit, ways in report["links"]["rows"].items():
            for way, row in ways.items():
                speed = report["links"]["bytes"] / row["seconds"] / 1e6
                print(
                    f"{limit + ' MB/s':20} {way:15} {row['seconds']:7.3f} {speed:7.0f} {row['cpu']:6.2f} {row['stored']:7.3f}"
                )
    print()
    show_aims(report["aims"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "snapshots", type=Path, nargs="?", help="output of snapshots.py; without it, only the speeds of made-up states"
    )
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the speeds")
    parser.add_argument("--link-rounds", type=int, default=5)
    parser.add_argument(
        "--states", type=int, default=4, help="number of states, of 185 MiB each, that are flushed as one"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    parser.add_argument(
        "--set", nargs="+", choices=[one.name for one in codec_sets.SETS], default=[], help="run only these sets"
    )
    parser.add_argument("--directory", help="directory for the stores")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    if options.snapshots is None and options.only != ["speed"]:
        parser.error("sizes and links need the states that snapshots.py trains; `--only speed` does without")
    report: dict[str, Any] = {
        "rounds": options.rounds,
        "link rounds": options.link_rounds,
        "machine": {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "torch": torch.__version__},
        **{part: {} for part in PARTS},
    }
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=options.directory, ignore_cleanup_errors=True) as root:
        if "speed" in options.only:
            cases = codec_speed.cases(options.snapshots) if options.snapshots else codec_speed.made_up_cases()
            processes = codec_processes.report(cases, options.rounds)
            report["speed"] = codec_speed.report(cases, options.rounds) | {"processes": processes}
        if "sets" in options.only:
            report["sets"] = codec_sets.report(options.snapshots, Path(root), options.set)
        if "links" in options.only:
            report["links"] = codec_links.report(options.snapshots, Path(root), options.states, options.link_rounds)
    report["aims"] = aims(report)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    if options.plot:
        plot(report, Path(options.plot))


if __name__ == "__main__":
    main()
