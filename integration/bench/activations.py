"""A training step with its activations kept, on the host by ``save_on_cpu``, offloaded by `Activations`, or recomputed.

``python integration/bench/activations.py`` takes about a minute on two cores, and 400 MiB of disk. All ways train the
same model in turn, and their gradients are compared. With a GPU (``--device cuda``), peaks are those of torch's
allocator. Without one, a fake GPU has all tensors: its peak is counted, and ``save_on_cpu`` has nothing to move there.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from harness import Aims, machine, parser, say
from torch.autograd.graph import save_on_cpu

from tierfs.device.accelerator import register_accelerator
from tierfs.experimental.activations import Activations

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.activation_models import Meter, WholeGpu


def step(model: Any, x: Any, offload: AbstractContextManager[Any], *, is_on_gpu: bool) -> float:
    """Return the seconds of a forward and a backward pass."""
    model.zero_grad()
    torch.manual_seed(0)
    begun = time.perf_counter()
    with offload:
        loss = model(x).square().mean()
    loss.backward()
    if is_on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def peak_of(model: Any, x: Any, offload: AbstractContextManager[Any], *, is_on_gpu: bool) -> int:
    """Return the most bytes of the GPU that a step takes beyond those that it begins with."""
    model.zero_grad()
    if not is_on_gpu:
        with Meter() as meter:
            step(model, x, offload, is_on_gpu=False)
        return meter.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model, x, offload, is_on_gpu=True)
    return torch.cuda.max_memory_allocated() - before


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--length", type=int, default=256, help="tokens of each of 4 sequences")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ram", default="16MiB", help="host memory of the rows with a disk")
    arguments.add_argument("--nvme", default="4GiB", help="size of the file of the rows with a disk")
    arguments.add_argument("--whole-ram", default="2GiB", help="host memory of the row without a disk")
    arguments.add_argument("--min-bytes", default="512KiB")
    arguments.add_argument("--device", default="cpu")
    given = arguments.parse_args()
    is_on_gpu = given.device != "cpu"
    if is_on_gpu:  # equal gradients need kernels that add in one order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if not is_on_gpu:
        register_accelerator(WholeGpu())
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(given.width, 8, 4 * given.width, activation="gelu", batch_first=True)
    model = torch.nn.TransformerEncoder(block, given.layers, enable_nested_tensor=False).to(given.device)
    x = torch.randn(4, given.length, given.width, device=given.device)
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=given.directory) as directory:
        disk = {"nvme": given.nvme, "directory": directory, "min_bytes": given.min_bytes}
        ways: dict[str, Any] = {
            "kept": contextlib.nullcontext(),
            "save_on_cpu": save_on_cpu(pin_memory=is_on_gpu),
            "ram": Activations(given.whole_ram, min_bytes=given.min_bytes),
            "nvme": Activations(given.ram, **disk),
            "nvme, auto": Activations(given.ram, keep="auto", **disk),
            "nvme, wrapped": Activations(given.ram, **disk),
        }
        models = dict.fromkeys(ways, model) | {"nvme, wrapped": copy.deepcopy(model)}
        ways["nvme, wrapped"].wrap(models["nvme, wrapped"].layers)
        took_s: dict[str, list[float]] = {way: [] for way in ways}
        wrong = 0
        for number in range(given.rounds + 3):  # three steps to learn and to warm up
            wanted = None
            for way, offload in ways.items():
                seconds = step(models[way], x, offload, is_on_gpu=is_on_gpu)
                took_s[way] += [seconds] if number > 2 else []
                grads = [parameter.grad.clone() for parameter in models[way].parameters()]
                wanted = wanted or grads
                wrong += not all(torch.equal(found, other) for found, other in zip(grads, wanted, strict=True))
        peaks = {way: peak_of(models[way], x, offload, is_on_gpu=is_on_gpu) for way, offload in ways.items()}
        stats = {way: offload.stats() for way, offload in ways.items() if isinstance(offload, Activations)}
    aims = Aims()
    medians = {way: statistics.median(seconds) for way, seconds in took_s.items()}
    aims.at_most("steps whose gradients differ", wrong, 0)
    aims.at_most("peak with nvme, of the peak with all kept", peaks["nvme"] / peaks["kept"], 0.6)
    if is_on_gpu:
        aims.at_most("step with ram, of the step with all kept", medians["ram"] / medians["kept"], 1.01)
        aims.at_most("step with nvme, auto, of the step with all kept", medians["nvme, auto"] / medians["kept"], 1.03)
    rows = {
        way: {
            "step ms": 1e3 * medians[way],
            "peak MiB": peaks[way] / 2**20,
            **({"waited ms a step": 1e3 * stats[way]["waited_s"] / (given.rounds + 4)} if way in stats else {}),
            **({"kept by choice": stats[way]["kept"].get("auto", 0)} if way in stats else {}),
        }
        for way in ways
    }
    report = {"machine": machine(torch=torch.__version__, device=given.device), "ways": rows, "aims": aims.found}
    say(report, as_json=given.json)
    return int(not all(each["holds"] for each in aims.found))


if __name__ == "__main__":
    sys.exit(main())
