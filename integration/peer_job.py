"""One rank of a job that saves a part of its own at ``peer``: ``peer_job.py URL OPTIONS``."""

import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tierfs.dcp import TierWriter


def main():
    url, options = sys.argv[1], json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    writer = TierWriter(url, **{**options, "ack": "peer"})
    dcp.save({f"part{rank}": torch.randn(600, 600)}, storage_writer=writer)
    assert writer.ack() in ("peer", "object")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
