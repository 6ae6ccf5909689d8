"""verl's own manager brings weights from a trainer to two rollouts, each with the local tiers of a host of its own.

``verl_rollouts.py DIRECTORY [--ranks N] [--layers N] [--begin N] [--versions N] [--steps N] [--rate LR]`` trains a model
in float32 and sends it in bfloat16 through a bucket of this host. Every tensor is compared. A line for each version has
the bytes that each rollout read from the bucket, as a share of the weights' bytes, and the seconds.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import fsspec
import ray
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from servers import ministack
from servers.server import free_ports

import tierfs
from tierfs.digest import checksum
from tierfs.objects.wrappers.limits import MeasuredObjects


def digest(tensor):
    return checksum(tensor.contiguous().view(torch.uint8).numpy()).hex()


class Trainer(Worker):
    """A sharded model in float32. verl's own trainer has these methods, and calls the engine as this one does."""

    def __init__(self, config, layers):
        super().__init__()
        initialize_global_process_group_ray(backend="gloo")
        torch.set_num_threads(1)
        torch.manual_seed(1)
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": layers, "num_attention_heads": 4}
        self.model = fully_shard(LlamaForCausalLM(LlamaConfig(vocab_size=4096, **sizes)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        import_external_libs(config.custom_backend_module)
        options = {"is_master": self.rank == 0, "bucket_size": config.update_weights_bucket_megabytes << 20}
        self.engine = CheckpointEngineRegistry.new(config.backend, **options, **config.engine_kwargs[config.backend])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, steps, rate):
        self.optimizer.param_groups[0]["lr"] = rate
        for _ in range(steps):
            tokens = (torch.randint(64, (4, 1)) + torch.arange(64) * torch.randint(1, 60, (4, 1))) % 4096
            self.model(tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self):
        return ((name, value.full_tensor().bfloat16()) for name, value in self.model.state_dict().items())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        return await self.engine.send_weights(self.weights(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self):
        return {name: digest(value) for name, value in self.weights()}


class Adapter:
    """Takes the weights, as the adapter of an inference server does."""

    replica_rank, is_leader_rank = 0, True

    async def update_weights(self, weights, global_steps=None, wire_format=None):
        assert wire_format == "named_tensors"
        self.found, self.length = {}, 0
        async for name, tensor in weights:
            assert name not in self.found
            self.found[name], self.length = digest(tensor), self.length + tensor.nbytes


class Rollout(CheckpointEngineWorker):
    def __init__(self, config):
        super().__init__(config, None, server_adapter=Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def outcome(self):
        """Return the digests, the bytes of the weights, and the bytes that this process has read from buckets."""
        from tierfs.session.open import open_stores  # here, because Ray would send a copy of a global value

        total = 0
        for store in open_stores.values():
            objects = store.objects
            while not isinstance(objects, MeasuredObjects):
                objects = objects.inner
            total += sum(objects.snapshot()[method]["bytes"] for method in ("get", "read"))
        return self.server_adapter.found, self.server_adapter.length, total


class Replica:
    """An inference server that has one worker, and nothing to do before and after an update."""

    def __init__(self, worker):
        self.workers = [worker]

    async def nothing(self, **_):
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def started(kind, names, ranks, *arguments):
    """Start a process of a kind for each name, and return them with their group. All with one name are one host."""
    made = ray.remote(kind)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    handles = []
    for at, name in enumerate(names):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[name], "WORLD_SIZE": ranks, "RANK": at % ranks}
        variables |= {"TIERFS_STATE_DIR": f"{given.directory}/{name}", "TIERFS_RAM": "256MiB", "TIERFS_NVME": "0"}
        variables = {name: str(value) for name, value in variables.items()}
        handles.append(made.options(num_cpus=0.1, runtime_env={"env_vars": variables}).remote(*arguments))
    return handles, RayWorkerGroup(worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls=made))


parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--ranks", type=int, default=1)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--begin", type=int, default=200, help="steps at the rate 3e-4, then at the rate")
parser.add_argument("--versions", type=int, default=24)
parser.add_argument("--steps", type=int, default=1, help="steps between versions")
parser.add_argument("--rate", type=float, default=1e-6)
given = parser.parse_args()
with ministack.running() as server:
    store = f"tierfs::s3://{server.new_root()}"
    tierfs.init(store, options=server.options)
    config = CheckpointEngineConfig(
        backend="tierfs",
        custom_backend_module="tierfs.plugs.verl",
        update_weights_bucket_megabytes=4,
        engine_kwargs={"tierfs": {"url": f"{store}/weights", "s3": server.options}},
    )
    ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False)
    _, trainer = started(Trainer, ["trainer"] * given.ranks, given.ranks, config, given.layers)
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    handles, rollouts = started(Rollout, ["rollout-0", "rollout-1"], 1, rollout_config)
    manager = CheckpointEngineManager(config, trainer, list(map(Replica, handles)))
    trainer.train(given.begin, 3e-4)
    trainer.train(given.begin, given.rate)
    before = [0, 0]
    for version in range(given.versions):
        begun = time.perf_counter()
        metrics = manager.update_weights(global_steps=version)
        seconds = time.perf_counter() - begun
        outcomes, expected = rollouts.outcome(), trainer.digests()[0]
        assert all(found == expected for found, _, _ in outcomes), "a rollout has other weights than the trainer"
        shares = [(total - past) / length for (_, length, total), past in zip(outcomes, before, strict=True)]
        before = [total for _, _, total in outcomes]
        line = {"version": version, "bytes": outcomes[0][1], "read": shares, "seconds": seconds, **metrics}
        print(json.dumps(line), flush=True)
        trainer.train(given.steps, given.rate)
    fs, path = fsspec.url_to_fs(f"{store}/weights", s3=server.options)
    print(json.dumps({"left": sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))}), flush=True)
