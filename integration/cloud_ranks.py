"""One of two ranks that save a checkpoint, or load and check it: ``cloud_ranks.py save|load URL ACK``."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tierfs.dcp import TierReader, TierWriter

NUMBERS = 5 << 20  # 20 MiB as float32


def main() -> None:
    verb, url, ack = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shared = torch.arange(NUMBERS, dtype=torch.float32)
    own = {f"rank{each}": shared * (each + 2) for each in range(dist.get_world_size())}
    if verb == "save":
        writer = TierWriter(url, ack=ack)
        dcp.save({"shared": shared, f"rank{rank}": own[f"rank{rank}"], "step": 7}, storage_writer=writer)
        writer.wait("object", timeout=120)
    else:
        state = {"shared": torch.zeros(NUMBERS), **{name: torch.zeros(NUMBERS) for name in own}, "step": 0}
        dcp.load(state, storage_reader=TierReader(url, ack=ack))
        assert torch.equal(state["shared"], shared)
        assert all(torch.equal(state[name], value) for name, value in own.items())
        assert state["step"] == 7
    dist.barrier()
    dist.destroy_process_group()


main()
