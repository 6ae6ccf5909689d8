"""Seconds for which one save blocks training, through a plug and in the framework's own ways, on one host.

``blocked.py DIRECTORY [MEBIBYTES]`` writes to a local disk and to an S3 server of this host, in turns. Each row has the
median of the saves after the first one.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
}

import deepspeed
import deepspeed.ops
import fsspec
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem, copy_files

sys.path.insert(0, str(Path(__file__).parents[1]))
from servers import ministack

import tierfs
from tierfs.plugs.deepspeed import save_checkpoint
from tierfs.plugs.lightning import TierCheckpointIO
from tierfs.train import Manager

SAVES = 6
directory = Path(tempfile.mkdtemp(dir=sys.argv[1]))
count = int(sys.argv[2]) * (1 << 18) if len(sys.argv) > 2 else 64 << 18
state = {"state_dict": {f"layer.{at}": torch.randn(count // 16) for at in range(16)}, "global_step": 0}


def to_pyarrow(fs, root):
    target = PyFileSystem(FSSpecHandler(fs)) if fs is not None else LocalFileSystem()

    def save(step):
        target.create_dir(f"{root}/ray-{step}")
        copy_files(str(directory / "made"), f"{root}/ray-{step}", destination_filesystem=target, chunk_size=64 << 20)

    return save


def put(fs, root):
    return lambda step: fs.put(f"{directory}/made/", f"{root}/put-{step}", recursive=True)


def stock_dcp(root):
    return lambda step: torch.distributed.checkpoint.save(state, checkpoint_id=f"{root}/dcp-{step}", no_dist=True)


def deepspeed_engine():
    """Return an engine whose state, weights and two moments, has the same bytes."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for a minute
    deepspeed.init_distributed("gloo")
    side = 512
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(count // 3 // side**2)))
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    settings |= {"zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(torch.randn(1, side)).sum())
    engine.step()
    return engine


def copied(save, s3, bucket):
    """Save to a local directory, which is then copied: the framework itself knows no bucket."""

    def both(step):
        save(step)
        s3.put(f"{directory}/copied/{step}", f"{bucket}/copied/{step}", recursive=True)

    return both


def logged(url, **options):
    fsspec.config.conf["tierfs"] = options  # MLflow has no options for this
    repository = get_artifact_repository(url)
    fsspec.config.conf.pop("tierfs")
    return lambda step: repository.log_artifact(str(directory / "made" / "checkpoint.pt"), str(step))


def measure(ways):
    taken = {name: [] for name in ways}
    for step in range(SAVES):
        for value in state["state_dict"].values():
            value.add_(0.01)
        torch.save(state, directory / "made" / "checkpoint.pt")
        for name, save in ways.items():
            begun = time.perf_counter()
            save(step)
            taken[name].append(time.perf_counter() - begun)
            time.sleep(0.7)  # the flusher's time is not the save's
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


with ministack.running() as server:
    (directory / "made").mkdir()
    bucket, options = server.new_root().strip("/"), server.options
    s3 = fsspec.filesystem("s3", **options)
    tierfs.init(f"file://{directory}/store")
    url = f"tierfs::file://{directory}/store/run"
    fs, root = fsspec.url_to_fs(url, ack="staged")
    fsspec.config.conf["s3"] = options
    os.environ |= {"MLFLOW_S3_ENDPOINT_URL": options["endpoint_url"]}
    engine = deepspeed_engine()
    with Manager(f"{url}/titan", save=[]) as manager:
        found = measure(
            {
                "Lightning, TorchCheckpointIO, local disk": lambda step: TorchCheckpointIO().save_checkpoint(
                    state, str(directory / "lightning" / f"{step}.ckpt")
                ),
                "Lightning, TorchCheckpointIO, s3fs": lambda step: TorchCheckpointIO().save_checkpoint(
                    state, f"s3://{bucket}/lightning/{step}.ckpt"
                ),
                "Lightning, TierCheckpointIO": lambda step: TierCheckpointIO().save_checkpoint(
                    state, f"{url}/{step}.ckpt"
                ),
                "torchtitan (disabled), local disk": stock_dcp(directory / "titan"),
                "torchtitan (disabled), s3fs": stock_dcp(f"s3://{bucket}/titan"),
                "torchtitan, TierCheckpointManager": lambda step: manager.save(step, state),
                "Ray, its own upload, local disk": to_pyarrow(None, str(directory / "ray")),
                "Ray, its own upload, s3fs": to_pyarrow(s3, f"{bucket}/ray"),
                "Ray, upload(ack='staged')": put(fs, root),
                "DeepSpeed, local disk": lambda step: engine.save_checkpoint(str(directory / "deepspeed"), str(step)),
                "DeepSpeed, local disk, then s3fs": copied(
                    lambda step: engine.save_checkpoint(str(directory / "copied"), str(step)), s3, bucket
                ),
                "DeepSpeed, the plug": lambda step: save_checkpoint(
                    engine, f"{url}/deepspeed", str(step), ack="staged"
                ),
                "MLflow, local disk": logged(str(directory / "mlflow")),
                "MLflow, its own S3": logged(f"s3://{bucket}/mlflow"),
                "MLflow, the plug (local)": logged(f"{url}/mlflow"),
                "MLflow, the plug (staged)": logged(f"{url}/mlflow-staged", ack="staged"),
            }
        )
    fs.wait(root, "object", timeout=120)
for name, seconds in found.items():
    print(f"{name:45} {seconds:.3f} s")
shutil.rmtree(directory)
