"""Stored against logical bytes, save by save, of a training that is killed once and repeats two saves.

    python integration/bench/stored.py [--params 10M] [--saves 12] [--directory DIR] [--json]

A small GPT learns bytes with AdamW in float32, and its whole state is saved every five steps by a `TierWriter`, with the
codecs of a store in a cloud. After two thirds of the saves, model, optimizer, data and random numbers go back by two saves,
as after a crash, and the same steps are made and saved again. The second run trains the last block only, as fine-tuning
does. ``stored`` is all that the object tier holds. docs/pictures/plots.py draws it.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import SEED, Aims, end_flusher, machine, parser, private_slabs, say
from torch.distributed.checkpoint.state_dict import get_state_dict

import tierfs
from tierfs.dcp import TierWriter
from tierfs.demo.model import ByteGPT, ByteStream, shape_for, standard_library_text
from tierfs.units import parse_size

STEPS = 5
REPEATED = 2
RUNS = {"all weights are trained": 0.75, "the last block is trained": 0.4}


def curve(root: Path, size: int, saves: int, *, last_block: bool) -> list[dict[str, int]]:
    """Train and save. Return the bytes of all checkpoints so far and those in the object tier, after each save."""
    torch.manual_seed(SEED)
    model = ByteGPT(shape_for(size))
    for parameter in model.parameters() if last_block else ():
        parameter.requires_grad_(False)
    for parameter in model.blocks[-1].parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-4)
    text = standard_library_text()
    stream = ByteStream(text, batch=8, context=model.shape.context, rank=0, world_size=1, seed=SEED)
    url = f"tierfs::file://{root}/store"
    os.environ["TIERFS_STATE_DIR"] = str(root / "host")
    tierfs.init(url)
    writer = TierWriter(url, ack="object", codecs="all", ram=size * 36 + (256 << 20), nvme=0)
    points, states, logical, number, repeats = [], {}, 0, 0, False
    while number < saves:
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(model(*stream.next_batch()))
            optimizer.step()
        number += 1
        weights, moments = get_state_dict(model, optimizer)
        name = f"{url}/{'resumed' if repeats else 'run'}/step_{number * STEPS}"
        dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer, checkpoint_id=name, no_dist=True)
        tensors = [*model.state_dict().values(), *(value for one in optimizer.state.values() for value in one.values())]
        logical += sum(tensor.nbytes for tensor in tensors)
        points.append({"step": number * STEPS, "logical": logical, "stored": stored_bytes(root / "store")})
        held = (model.state_dict(), optimizer.state_dict(), stream.state_dict(), torch.get_rng_state())
        states[number] = copy.deepcopy(held)
        if not repeats and number == saves * 2 // 3:
            number, repeats = number - REPEATED, True
            old_weights, old_moments, position, random = states[number]
            model.load_state_dict(old_weights)
            optimizer.load_state_dict(old_moments)
            stream.load_state_dict(position)
            torch.set_rng_state(random)
    end_flusher(writer.status())
    return points


def stored_bytes(store: Path) -> int:
    return sum(os.stat(Path(base, name)).st_size for base, _, names in os.walk(store) for name in names)


def main() -> None:
    arguments = parser(__doc__, "directory for the stores")
    arguments.add_argument("--params", default="10M", help="size of the model")
    arguments.add_argument("--saves", type=int, default=12)
    options = arguments.parse_args()
    report: dict[str, Any] = {"seed": SEED, "machine": machine(torch=torch.__version__), "curves": {}}
    found = Aims()
    for name, limit in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=options.directory) as root, private_slabs():
            points = curve(Path(root), parse_size(options.params), options.saves, last_block=name != next(iter(RUNS)))
        report["curves"][name] = points
        found.at_most(f"{name}: stored, of the logical bytes", points[-1]["stored"] / points[-1]["logical"], limit)
    report["aims"] = found.found
    say(report, as_json=options.json)


if __name__ == "__main__":
    main()
