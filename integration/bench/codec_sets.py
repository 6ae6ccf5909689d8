"""Sizes for `codec.py`: states saved into a store, and the bytes of its object tier."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from codec_states import NAMES, bytes_of, changed, load, same, steps_of
from harness import end_flusher, private_slabs

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.digest import BLOCK_BYTES

RAM_STATES = 3
SPARE_BYTES = 256 << 20
ZSTD_LEVEL = 3
ZIPNN_BYTES_MIN = 512  # zipnn kills the process on inputs of a few bytes


@dataclass(frozen=True)
class Set:
    """A state and the same state some steps later, saved one after the other.

    Attributes:
        name: Its name in the report.
        run: A run of `snapshots.py`.
        first: Index of the first state, in the order of steps.
        second: Index of the second state.
        later: Steps between the two.
        classes: Classes of the tensors in a state.
        limits: Most stored over raw bytes of the first and the second save. None means no aim.
        of_changed: Whether the second limit counts only the raw bytes of the changed tensors.
        dcp: Whether `torch.distributed.checkpoint` saves the states. Otherwise each is a safetensors file.
    """

    name: str
    run: str
    first: int
    second: int
    later: int
    classes: tuple[str, ...] = tuple(NAMES)
    limits: tuple[float | None, float | None] = (None, None)
    of_changed: bool = False
    dcp: bool = False


SETS = (
    Set("fp32 master, late", "fp32master", 4, 6, 10, limits=(0.72, 0.65)),
    Set("fp32 master, early", "fp32master", 0, 2, 10),
    Set("pure bf16, late", "purebf16", 4, 6, 10, limits=(0.66, 0.47)),
    Set("LoRA, frozen base, DCP", "lora", 0, 2, 10, limits=(None, 0.75), of_changed=True, dcp=True),
    Set("LoRA, frozen base, one file", "lora", 0, 2, 10),
    Set("bf16 weights, lr 1e-6", "finetune", 3, 4, 1, classes=("w16",), limits=(None, 0.02)),
    Set("fine-tuning, lr 1e-6", "finetune", 3, 5, 10),
    Set("experts, sparse embedding", "sparse", 0, 2, 10),
)


class Saved:
    """A store in its own directory, with states saved as safetensors files or as DCP checkpoints.

    Args:
        root: An empty directory.
        size: Bytes of a state.
        dcp: Whether states are saved as DCP checkpoints.
    """

    def __init__(self, root: Path, size: int, *, dcp: bool) -> None:
        self._root = root
        self._url = f"tierfs::file://{root}/store"
        tierfs.init(f"file://{root}/store")
        options = {
            "ack": "staged",
            "ram": size * RAM_STATES + SPARE_BYTES,
            "nvme": 0,
            "state_dir": str(root / "host"),
            "codecs": "all",
        }
        self._fs, self._path = fsspec.url_to_fs(self._url, **options)
        self._writer = TierWriter(self._url, **options) if dcp else None

    def save(self, step: int, state: dict[str, torch.Tensor]) -> dict[str, float]:
        """Save a state and wait for the object tier. Return the bytes by which the store grew, and the seconds."""
        data = safetensors.torch.save(state) if self._writer is None else b""
        before = self._stored()
        begin = time.perf_counter()
        if self._writer is None:
            with self._fs.open(f"{self._path}/{self._file(step)}", "wb") as file:
                file.write(data)
        else:
            dcp.save(state, storage_writer=self._writer, checkpoint_id=self._checkpoint(step), no_dist=True)
        self._fs.wait(self._path, "object")
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "raw": len(data) or bytes_of(state), "stored": self._stored() - before}

    def check(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """Load a state without local tiers, and compare every tensor bit for bit.

        Raises:
            RuntimeError: A tensor differs.
        """
        elsewhere: dict[str, Any] = {"ram": 0, "nvme": 0, "state_dir": str(self._root / "elsewhere")}
        if self._writer is None:
            fs, path = fsspec.url_to_fs(f"{self._url}/{self._file(step)}", **elsewhere)
            loaded = safetensors.torch.load(fs.cat(path))
        else:
            loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            dcp.load(loaded, storage_reader=TierReader(self._checkpoint(step), **elsewhere), no_dist=True)
        wrong = [name for name in state if name not in loaded or not same(state[name], loaded[name])]
        if wrong or len(loaded) != len(state):
            raise RuntimeError(f"{self._url}, step {step}: what was loaded is not what was saved: {wrong}")

    def stop(self) -> None:
        end_flusher(self._fs.status(self._path))

    def _file(self, step: int) -> str:
        return f"run/step_{step}/state.safetensors"

    def _checkpoint(self, step: int) -> str:
        return f"{self._url}/run/step_{step}"

    def _stored(self) -> int:
        found = (os.path.join(base, name) for base, _, names in os.walk(self._root / "store") for name in names)
        return sum(os.stat(path).st_size for path in found)


def measured(one: Set, snapshots: Path, root: Path) -> dict[str, dict[str, float]]:
    """Return the raw and stored bytes of both saves, for tierfs and for peers with the same bytes.

    Of the second save the peers get only the changed tensors.
    """
    steps = steps_of(snapshots / one.run)
    first, second = (load(steps[number], one.classes) for number in (one.first, one.second))
    with private_slabs():
        saved = Saved(root, bytes_of(first), dcp=one.dcp)
        try:
            found = {"static": saved.save(0, first), "delta": saved.save(one.later, second)}
            saved.check(0, first)
            saved.check(one.later, second)
        finally:
            saved.stop()
    new = changed(second, first)
    found["static"] |= _peers(first) | {"changed": bytes_of(first)}
    found["delta"] |= _peers(new) | {"changed": bytes_of(new), "zstd-3 patch-from": _zstd_from(new, first)}
    return found


def _peers(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {"zstd-3": _zstd(state), "zipnn": _zipnn(state)}


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _zstd(tensors: dict[str, torch.Tensor]) -> int:
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return sum(len(compressor.compress(_tensor_bytes(tensor))) for tensor in tensors.values())


def _zstd_from(tensors: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> int:
    """Return the bytes after ``zstd --patch-from``; a block's dictionary is the same block of the base tensor."""
    window = (2 * BLOCK_BYTES).bit_length()
    parameters = zstandard.ZstdCompressionParameters.from_level(ZSTD_LEVEL, window_log=window, enable_ldm=True)
    total = 0
    for name, tensor in tensors.items():
        raw, before = _tensor_bytes(tensor), _tensor_bytes(base[name])
        for at in range(0, len(raw), BLOCK_BYTES):
            content = bytes(before[at : at + BLOCK_BYTES])
            dictionary = zstandard.ZstdCompressionDict(content, zstandard.DICT_TYPE_RAWCONTENT)
            compressor = zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters)
            total += len(compressor.compress(raw[at : at + BLOCK_BYTES]))
    return total


def _zipnn(tensors: dict[str, torch.Tensor]) -> int:
    try:
        from zipnn import ZipNN
    except ImportError:
        raise ModuleNotFoundError("codec.py compares with zipnn: pip install zipnn") from None
    total = 0
    for tensor in tensors.values():
        kind = "bfloat16" if tensor.dtype == torch.bfloat16 else "float32"
        raw = bytearray(_tensor_bytes(tensor))  # a copy, because zipnn changes its input
        if len(raw) < ZIPNN_BYTES_MIN:
            total += len(raw)
            continue
        coder = ZipNN(bytearray_dtype=kind, input_format="byte", threads=1)
        encoded = coder.compress(raw)
        assert bytes(coder.decompress(encoded)) == bytes(_tensor_bytes(tensor)), "zipnn lost something"
        total += min(len(encoded), tensor.nbytes)
    return total


def report(snapshots: Path, root: Path, names: list[str]) -> dict[str, Any]:
    """Measure each set in a process of its own, whose slabs go when it ends."""
    found = {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for number, one in enumerate(SETS):
            if not names or one.name in names:
                directory = root / str(number)
                directory.mkdir()
                found[one.name] = processes.apply(measured, (one, snapshots, directory)) | {"later": one.later}
                shutil.rmtree(directory, ignore_errors=True)  # its flusher may still be ending
    return found
