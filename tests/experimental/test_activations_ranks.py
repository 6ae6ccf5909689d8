"""With FSDP2 on two ranks and two accumulated batches, gradients are equal bit for bit to those without offloading."""

import warnings
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
from support.activation_models import batch, new_model
from support.torch_ranks import run_world
from support.waiting import HANG_S
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tierfs.experimental.activations import Activations

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

WORLD = 2


def gradients(rank, activations, *, wraps):
    model, mesh = new_model(layers=2), init_device_mesh("cpu", (WORLD,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if wraps:
        activations.wrap(model.layers)
    for number in range(2):
        torch.manual_seed(3 + number)
        with activations or torch.enable_grad():
            loss = model(batch(seed=10 * rank + number))
        loss.backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def main(rank, directory):
    warnings.simplefilter("ignore")  # torch warns of a layer that returns a view
    dist.init_process_group(
        "gloo", f"file://{directory}/world", rank=rank, world_size=WORLD, timeout=timedelta(seconds=HANG_S)
    )
    wanted = gradients(rank, None, wraps=False)
    for wraps in (False, True):
        activations = Activations("1MiB", "64MiB", min_bytes="64KiB", directory=directory)
        found = gradients(rank, activations, wraps=wraps)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        stats = activations.stats()
        assert stats["moved_bytes"]["write"] > 0
        assert stats["failures"] == {}
        assert stats["disk_bytes"] == 0
    dist.destroy_process_group()


def test_two_ranks_with_fsdp_and_accumulation(tmp_path):
    run_world(main, WORLD, str(tmp_path))
