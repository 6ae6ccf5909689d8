"""Ranks of a torch world as forks of one process that has imported torch."""

import torch.distributed.checkpoint  # noqa: F401 - so that all modules of this process are those of the server

from support.zygote import Zygote

zygote = Zygote(
    "torch._dynamo",  # an optimizer's first step imports it
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torchdata.stateful_dataloader",
    "torch.utils.serialization.config",
    "tierfs.codec.planes",
    "tierfs.dcp",
    "tierfs.fs.filesystem",
    "tierfs.session.tiers",
    "tierfs.train.manager",
    "tierfs.train.state",
)


def run_world(main, size, *arguments):
    """Run ``main(rank, *arguments)`` in so many processes until all have ended."""
    ranks = [zygote.start(main, rank, *arguments) for rank in range(size)]
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * size
