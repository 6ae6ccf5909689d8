"""A process that saves the state another one staged, as DCP's does.

It lives for many saves, and keeps the last state until the next.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from support.opened import descriptors, mappings
from tierfs.dcp.save.shard_file import ShardFile

COPIED: list[int] = []


class Halving(DefaultSavePlanner):
    """Save other values than the staged ones."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found / 2 if isinstance(found, torch.Tensor) else found


def count_copies() -> None:
    real = ShardFile.add_from_host

    def add(self: ShardFile, tensors: Any) -> Any:
        COPIED.append(sum(tensor.nbytes for _, tensor in tensors))
        return real(self, tensors)

    ShardFile.add_from_host = add  # type: ignore[method-assign]


def save(state: Any, writer: Any, url: str, planner: Any) -> int:
    COPIED.clear()
    dcp.save(state, storage_writer=writer, checkpoint_id=url, planner=planner, no_dist=True)
    return sum(COPIED)


def serve(conn: Any) -> None:
    count_copies()
    torch.set_num_threads(1)
    state: Any = None
    while True:
        try:
            request = conn.recv()
        except EOFError:
            return
        except Exception as error:
            conn.send(repr(error))
            continue
        do, arguments = request[0], request[1:]
        del request
        try:
            if do == "have":
                (state,) = arguments
                answer: Any = descriptors(), mappings(".slab")
            elif do == "values":
                answer = copy.deepcopy(state)
            elif do == "save":
                answer = save(state, *arguments)
            elif do == "metadata":
                answer = dcp.save(state, storage_writer=arguments[0], checkpoint_id=arguments[1], no_dist=True)
            elif do == "save some":
                answer = save({name: state[name] for name in arguments[0]}, *arguments[1:])
            else:
                assert do == "drop", do
                state = None
                gc.collect()
                answer = descriptors(), mappings(".slab")
        except BaseException as error:
            answer = repr(error)
        conn.send(answer)
        del arguments
