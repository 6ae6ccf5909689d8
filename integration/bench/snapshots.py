"""Train small models and keep their states at some steps, as the input of `codec.py`.

    python integration/bench/snapshots.py DIRECTORY [RUN ...] [--steps 900] [--threads 2]

Takes about half an hour on two cores, and 6 GB. Needs ``tokenizers``. The text is Python's own library and the host's
documentation. A state is a directory ``DIRECTORY/RUN/STEP/`` of ``<class>.<tensor>.npy``. The classes are ``w16``
(the bits of the bfloat16 weights, as uint16), ``w32`` (float32 weights), and ``m`` and ``v`` (AdamW's ``exp_avg`` and
``exp_avg_sq``; uint16 if they are in bfloat16).

==========  ==========================================================================================================
fp32master  weights and moments in float32, computed in bfloat16, with a bfloat16 copy; b2=.95, cosine from 6e-4 to 6e-5
purebf16    weights and moments in bfloat16, as AdamW keeps them for a ``.bfloat16()`` model
finetune    continues from fp32master's last state with a small constant rate, 1e-5, then 1e-6; b2=.999
lora        fp32master's last state, frozen, with adapters of rank 16 beside every linear layer, rate 2e-4
sparse      16 experts, of which a token uses 2 and the others get no update; 32768 embedding rows with SparseAdam
==========  ==========================================================================================================

The random numbers of a process continue from run to run. Equal files take the same runs in the same order, and the
same torch and threads.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from snapshot_models import CONTEXT, HEAD_VOCABULARY, Decoder, adapt
from torch.nn import functional

SEED = 0
TEXT_CHARACTERS = 24e6
BATCH = 8
SPARSE_BATCH = 4
SPARSE_VOCABULARY = 32768
WARM_UP_STEPS = 40
TOLD_EVERY = 25
Rate = Callable[[int], float]


def texts() -> Iterator[str]:
    """Yield text that any host with Python has, up to a limit."""
    library = Path(os.__file__).parent
    patterns = (f"{library}/*.py", f"{library}/[a-z]*/*.py", "/usr/share/doc/**/*.txt", "/usr/share/vim/*/doc/*.txt")
    paths = [path for pattern in patterns for path in glob.glob(pattern, recursive=True)]
    paths = sorted(paths + glob.glob(f"{library}/test/*.py"))  # the test files are read twice
    count = 0
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = Path(path).read_text(encoding="utf-8")
            yield text
            count += len(text)
            if count > TEXT_CHARACTERS:
                return


def tokens(directory: Path, vocabulary: int) -> torch.Tensor:
    """Return the text in tokens of this vocabulary size. The first call tokenizes the text and stores the tokens."""
    path = directory / f"tok{vocabulary}.npy"
    if not path.exists():
        from tokenizers import ByteLevelBPETokenizer

        read = list(texts())
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(read, vocab_size=vocabulary, min_frequency=2)
        np.save(path, np.concatenate([np.array(found.ids, np.int32) for found in tokenizer.encode_batch(read)]))
    return torch.from_numpy(np.load(path).astype(np.int64))


def keep(directory: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write the state of a model and its optimizers."""
    directory.mkdir(parents=True, exist_ok=True)

    def write(kind: str, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        tensor = (tensor.to_dense() if tensor.is_sparse else tensor).contiguous()
        np.save(directory / f"{kind}.{name}.npy", bits(tensor))

    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and parameter.requires_grad:
            write("w32", name, parameter)
        write("w16", name, parameter.to(torch.bfloat16))
        for optimizer in optimizers:
            moments = optimizer.state.get(parameter)
            if moments and "exp_avg" in moments:
                write("m", name, moments["exp_avg"])
                write("v", name, moments["exp_avg_sq"])


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as a numpy array. numpy has no bfloat16, so its bits become uint16."""
    array: np.ndarray[Any, Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


class Training:
    """One run.

    Args:
        directory: Directory of the run.
        model: The model whose parameters the optimizers update.
        optimizers: All get the same rate.
        text: The text in tokens.
        batch: Sequences in a step.
        mixed: Whether float32 weights are computed with in bfloat16.
        targets: Targets are taken modulo this number of tokens; 0 for all tokens.
    """

    def __init__(
        self,
        directory: Path,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        text: torch.Tensor,
        *,
        batch: int = BATCH,
        mixed: bool = True,
        targets: int = 0,
    ) -> None:
        self._directory = directory
        self._model = model
        self._optimizers = optimizers
        self._text = text
        self._batch = batch
        self._mixed = mixed
        self._targets = targets

    def __call__(self, steps: int, rate: Rate, kept: Collection[int], *, start: int = 0, seed: int = 0) -> None:
        """Train some steps after earlier ones, and keep the states after some of them.

        Args:
            steps: Number of steps.
            rate: Learning rate by the number of the step, from 1.
            kept: Steps to keep, counted on from ``start``.
            start: Number of earlier steps.
            seed: Seed of the samples from the text.
        """
        generator = torch.Generator().manual_seed(seed)
        begin, log = time.monotonic(), []
        for step in range(start + 1, start + steps + 1):
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate(step - start)
            loss = self._step(generator)
            if step in kept:
                keep(self._directory / f"{step:06d}", self._model, self._optimizers)
            if step % TOLD_EVERY == 0 or step == start + 1:
                log.append((step, loss))
                seconds = time.monotonic() - begin
                print(f"{self._directory.name} {step}: loss {loss:.3f}, {seconds:.0f} s", flush=True)
        (self._directory / "log.json").write_text(json.dumps(log))

    def _step(self, generator: torch.Generator) -> float:
        begins = torch.randint(len(self._text) - CONTEXT - 1, (self._batch,), generator=generator)
        inputs = torch.stack([self._text[at : at + CONTEXT] for at in begins])
        targets = torch.stack([self._text[at + 1 : at + CONTEXT + 1] for at in begins])
        if self._targets:
            targets %= self._targets
        with torch.autocast("cpu", torch.bfloat16, enabled=self._mixed):
            logits = self._model(inputs)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        parameters = self._model.parameters()
        dense = [one for one in parameters if one.grad is not None and not one.grad.is_sparse]
        torch.nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.item()


def adamw(parameters: Any, b2: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, b2), weight_decay=0.1)


def cosine(steps: int, peak: float = 6e-4) -> Rate:
    """Return a rate with a short rise and then a fall to a tenth."""
    return lambda step: (
        peak * min(1, step / WARM_UP_STEPS) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / steps))))
    )


def rising(peak: float, steps: int = 20) -> Rate:
    """Return a rate that rises and then stays the same."""
    return lambda step: peak * min(1, step / steps)


def small_model() -> Decoder:
    return Decoder(HEAD_VOCABULARY, 384, 6, 6)


def trained(directory: Path) -> Decoder:
    model = small_model()
    model.load_state_dict(torch.load(directory / "fp32master.pt")[0])
    return model


def kept_steps(steps: int) -> set[int]:
    """Return early and late steps, each with the steps 1, 10 and 100 later."""
    return {first + later for first in (steps // 6, steps - 110) for later in (0, 1, 10, 100)}


def fp32master(directory: Path, steps: int) -> None:
    model = small_model()
    optimizer = adamw(model.parameters(), 0.95)
    train = Training(directory / "fp32master", model, [optimizer], tokens(directory, HEAD_VOCABULARY))
    train(steps, cosine(steps), kept_steps(steps))
    torch.save((model.state_dict(), optimizer.state_dict()), directory / "fp32master.pt")


def purebf16(directory: Path, steps: int) -> None:
    model = small_model().bfloat16()
    optimizer = adamw(model.parameters(), 0.95)
    train = Training(directory / "purebf16", model, [optimizer], tokens(directory, HEAD_VOCABULARY), mixed=False)
    train(steps, cosine(steps), kept_steps(steps))


def finetune(directory: Path, _: int) -> None:
    model = trained(directory)
    optimizer = adamw(model.parameters(), 0.999)
    train = Training(directory / "finetune", model, [optimizer], tokens(directory, HEAD_VOCABULARY))
    train(60, rising(1e-5), {40, 41, 50}, seed=7)
    train(40, lambda _: 1e-6, {90, 91, 100}, start=60, seed=8)


def lora(directory: Path, _: int) -> None:
    model = trained(directory)
    adapt(model)
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad], 0.999)
    train = Training(directory / "lora", model, [optimizer], tokens(directory, HEAD_VOCABULARY))
    train(80, rising(2e-4), {60, 61, 70}, seed=9)


def sparse(directory: Path, _: int) -> None:
    model = Decoder(SPARSE_VOCABULARY, 256, 4, 4, experts=True, tied=False, sparse=True)
    rest = [parameter for name, parameter in model.named_parameters() if name != "emb.weight"]
    optimizers = [adamw(rest, 0.95), torch.optim.SparseAdam([model.emb.weight], lr=1e-3)]
    text = tokens(directory, SPARSE_VOCABULARY)
    train = Training(directory / "sparse", model, optimizers, text, batch=SPARSE_BATCH, targets=HEAD_VOCABULARY)
    train(400, cosine(400), {250, 251, 260, 350})


RUNS: dict[str, Callable[[Path, int], None]] = {
    run.__name__: run for run in (fp32master, purebf16, finetune, lora, sparse)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=900, help="steps of fp32master and purebf16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    unknown = set(options.runs) - set(RUNS)
    if unknown:
        parser.error(f"no run is called {min(unknown)!r}: there are {', '.join(RUNS)}")
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)
    for run in options.runs or RUNS:
        (options.directory / run).mkdir(parents=True, exist_ok=True)
        RUNS[run](options.directory, options.steps)


if __name__ == "__main__":
    main()
