"""verl 0.9: the checkpoint engine ``tierfs``. The trainer saves each version of the weights, and the rollouts load it.

It is registered where verl imports this module: ``checkpoint_engine.custom_backend_module=tierfs.plugs.verl``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.errors import NotFoundError
from tierfs.plugs import announce
from tierfs.train.agree import reason_of
from tierfs.train.run import RunDirectory


@CheckpointEngineRegistry.register("tierfs")
class TierWeightsEngine(CheckpointEngine):
    """Saves a version of the weights as the next ``step_N`` of a directory, from which each rollout loads it.

    A version is stored as differences from an earlier one. A host that has that one in its ram tier reads no more than
    these, once for all its rollouts.

    Args:
        bucket_size: The bytes of tensors that a rollout loads at once. verl gives it.
        is_master: Whether this is the first rank of the trainer, which saves. verl gives it.
        url: A directory in a store, for this job alone. ``engine_kwargs.tierfs`` has this and the rest.
        ack: The level at which a version is saved. Rollouts on other hosts need ``"object"``.
        keep: How many versions of this process stay; 0 for all. ``tierfs gc`` frees the space of the others.
        timeout: Seconds for which a rollout waits for a version.
        **options: Options of the filesystem, such as ``s3={...}`` or ``ram="200GiB"``.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        url: str,
        ack: str = "object",
        keep: int = 2,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        self._options = {"ack": ack, "codecs": "all", **options}
        self._run = RunDirectory(Address.of(url, self._options))
        self._writer = TierWriter(url, overwrite=False, **self._options)
        self._bucket_size, self._is_master, self._keep, self._timeout = bucket_size, is_master, keep, timeout
        self._step, self._saved = -1, list[int]()
        if is_master:
            announce("weights for rollouts", url, ack)

    def prepare(self) -> int | None:
        return max(self._run.steps(), default=-1) + 1 if self._is_master else None

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Any]) -> Any:
        return {"step": [metadata[0]] * actor_wg_world_size}, {"step": [metadata[0]] * rollout_world_size}

    def init_process_group(self, step: int) -> None:
        self._step = step

    def finalize(self) -> None:
        for step in self._saved[: -self._keep]:  # all rollouts have loaded the newest version
            fs, path = fsspec.url_to_fs(self._run.url_of(step), **self._options)
            fs.rm(path, recursive=True)
            self._saved.remove(step)

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Save the weights, of which the first rank holds a copy in host memory. Return the seconds."""
        copies = {}
        async for name, weight in ensure_async_iterator(weights):
            if self._is_master:
                copies[name] = weight.detach().to("cpu", copy=True)
        if not self._is_master:
            return {}
        begun = time.perf_counter()
        _run(dcp.save, copies, storage_writer=self._writer, checkpoint_id=self._run.url_of(self._step))
        self._saved.append(self._step)
        return {"checkpoint_engine/save_s": time.perf_counter() - begun}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the version that is sent, and yield its names and tensors, on the device of this process.

        Raises `NotFoundError` if it was not complete in time, `CapacityError` if the ram tier has no room for it.
        """
        url, begun = self._run.url_of(self._step), time.monotonic()
        fs, path = fsspec.url_to_fs(url, **self._options)
        while not await asyncio.to_thread(fs.exists, f"{path}/.metadata"):
            if time.monotonic() - begun > self._timeout:
                raise NotFoundError(f"{url} was not complete in {self._timeout:g} s: see the trainer's first rank")
            await asyncio.sleep(0.25)
        # Whole chunks, because a host keeps no parts of chunks. The next version needs these.
        await asyncio.to_thread(fs.prefetch, path)
        for bucket in self._buckets():
            _run(dcp.load, bucket, storage_reader=TierReader(url, **self._options))
            for named in bucket.items():
                yield named

    def _buckets(self) -> Iterator[dict[str, torch.Tensor]]:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        bucket, room = dict[str, torch.Tensor](), self._bucket_size
        for name, saved in self._run.checkpoint(self._step).tensors.items():
            size = saved.size.numel() * saved.properties.dtype.itemsize
            if bucket and size > room:
                yield bucket
                bucket, room = {}, self._bucket_size
            bucket[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
            room -= size
        yield bucket


def _run(call: Any, *arguments: Any, **options: Any) -> None:
    """Save or load on this rank alone. torch wraps errors in a `BaseException`, which would end a Ray worker."""
    try:
        call(*arguments, no_dist=True, **options)
    except CheckpointException as error:
        raise reason_of(error) from error
