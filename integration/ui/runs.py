"""Runs for the page: a small training in a process of its own, and ten thousand checkpoints made by copies."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

LAYERS = 12


def layers(torch):
    """A state with the names of a transformer. Its later layers move more."""
    state = {"embedding.weight": torch.randn(256, 64)}
    for layer in range(LAYERS):
        for name, shape in (
            ("attention.wq", (64, 64)),
            ("attention.wo", (64, 64)),
            ("mlp.w1", (64, 256)),
            ("norm", (64,)),
        ):
            state[f"layers.{layer}.{name}.weight"] = torch.randn(shape)
    return state


def train(url, first, last, every, **options):
    """Save a run that improves, with the training manager."""
    import torch

    from tierfs.train import Every, Manager

    torch.manual_seed(first)
    state = layers(torch)
    with Manager(url, save=[Every(steps=every)], **options) as manager:
        for step in range(first, last + 1, every):
            for name, tensor in state.items():
                if name.startswith("layers."):
                    tensor.add_(torch.randn_like(tensor) * 10 ** (-4 + 3 * int(name.split(".")[1]) / LAYERS))
            loss = 4 / (1 + step / 300) + 0.05 * float(torch.rand(()))
            manager.step(step, {"model": state}, metrics={"loss": loss, "grad_norm": 1 + 40 / step})


def multiply(store, directory, name, count):
    """Copy a checkpoint's records to so many others, and give each a metric."""
    from tierfs.store import copy, list_directory, save

    files = [entry.path.rpartition("/")[2] for entry in list_directory(store, f"{directory}/{name}", detail=False)]

    def make(step):
        for file in files:
            if file not in {".metrics", ".record"}:
                copy(store, f"{directory}/{name}/{file}", f"{directory}/step_{step}/{file}")
        save(store, f"{directory}/step_{step}/.metrics", json.dumps({"loss": 1 / step}).encode())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(2, count + 1)))


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[5:])
    train(sys.argv[1], *map(int, sys.argv[2:5]), **words)
    os._exit(0)
