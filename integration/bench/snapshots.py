"""Trains small models for real, and keeps their states at some steps: what `codec.py` measures codecs on.

    python integration/bench/snapshots.py DIRECTORY [RUN ...] [--steps 900] [--threads 2]

About half an hour on two cores, 6 GB. Needs ``tokenizers``. The text is Python's own library and the host's documentation.
A state is a directory ``DIRECTORY/RUN/STEP/`` of ``<class>.<tensor>.npy``; the classes are ``w16`` (the bits of the bfloat16 weights, as
uint16), ``w32`` (float32 weights), ``m`` and ``v`` (AdamW's ``exp_avg`` and ``exp_avg_sq``; uint16 where they are kept in bfloat16).

==========  ==========================================================================================================
fp32master  weights and moments in float32, computed in bfloat16, with a bfloat16 copy; b2=.95, cosine from 6e-4 to 6e-5
purebf16    weights and moments in bfloat16, which is what AdamW does for a ``.bfloat16()`` model
finetune    goes on from fp32master's last state with a small constant rate, 1e-5, then 1e-6; b2=.999
lora        fp32master's last state, frozen, with adapters of rank 16 beside every linear layer, rate 2e-4
sparse      16 experts of which a token uses 2, the others get no update; an embedding of 32768 rows with SparseAdam
==========  ==========================================================================================================

The random numbers of a process go on from run to run, so that the same files take the same runs in the same order, torch and threads.
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
    """What there is to read on any host that has Python, up to a bound."""
    library = Path(os.__file__).parent
    patterns = (f"{library}/*.py", f"{library}/[a-z]*/*.py", "/usr/share/doc/**/*.txt", "/usr/share/vim/*/doc/*.txt")
    paths = [path for pattern in patterns for path in glob.glob(pattern, recursive=True)]
    paths = sorted(paths + glob.glob(f"{library}/test/*.py"))  # these are read twice
    count = 0
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = Path(path).read_text(encoding="utf-8")
            yield text
            count += len(text)
            if count > TEXT_CHARACTERS:
                return


def tokens(directory: Path, vocabulary: int) -> torch.Tensor:
    """The text in tokens of this many kinds, made at the first call."""
    path = directory / f"tok{vocabulary}.npy"
    if not path.exists():
        from tokenizers import ByteLevelBPETokenizer

        read = list(texts())
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(read, vocab_size=vocabulary, min_frequency=2)
        np.save(path, np.concatenate([np.array(found.ids, np.int32) for found in tokenizer.encode_batch(read)]))
    return torch.from_numpy(np.load(path).astype(np.int64))


def keep(directory: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write the state of a model."""
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
    """As numpy has it, which knows no bfloat16."""
    array: np.ndarray[Any, Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


class Training:
    """One run.

    Args:
        directory: Of the run.
        model: Whose parameters the optimizers have.
        optimizers: All get the same rate.
        text: In tokens.
        batch: Sequences of a step.
        mixed: Whether it computes in bfloat16 where the weights are float32.
        targets: The targets are taken modulo this number of tokens; 0 for all of them.
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
        """Train for some steps, after those that were trained before, and keep the states after some of them.

        Args:
            steps: How many.
            rate: The learning rate, by the number of the step, the first being 1.
            kept: Steps, counted on from ``start``.
            start: Steps before.
            seed: Of what is drawn from the text.
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
    """A short rise, then a fall to a tenth."""
    return lambda step: (
        peak * min(1, step / WARM_UP_STEPS) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / steps))))
    )


def rising(peak: float, steps: int = 20) -> Rate:
    """A rise, then the same rate for ever."""
    return lambda step: peak * min(1, step / steps)


def small_model() -> Decoder:
    return Decoder(HEAD_VOCABULARY, 384, 6, 6)


def trained(directory: Path) -> Decoder:
    """What fp32master ended with."""
    model = small_model()
    model.load_state_dict(torch.load(directory / "fp32master.pt")[0])
    return model


def kept_steps(steps: int) -> set[int]:
    """Early and late, each with a step that is 1, 10 and 100 steps later."""
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
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=900, help="of fp32master and purebf16")
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
