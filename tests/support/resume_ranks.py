"""The cells of the table of resumes that need two ranks, in one world: torch starts slowly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from support.resume_cells import CONTENTS, cell

WORLD = 2
RUNS = ("DDP", "FSDP2")


def place(url: str, content: str, runs: str) -> str:
    return f"{url}/{list(CONTENTS).index(content)}-{runs}"


def main(rank: int, directory: Path, url: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    for content in CONTENTS:
        for runs in RUNS:
            found[f"{content}/{runs}"] = cell(content, place(url, content, runs), runs=runs)
            dist.barrier()
    (directory / f"cells-{rank}.json").write_text(json.dumps(found, default=repr))
    dist.destroy_process_group()
