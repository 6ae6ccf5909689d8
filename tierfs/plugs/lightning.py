"""Lightning 2.6: `TierCheckpoint` saves a run; the strategies save sharded models. Files load without the plug."""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric import strategies as fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tierfs.checked_json import parse_object
from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter
from tierfs.errors import ConflictError, InvalidInputError, TierfsError
from tierfs.format.checkpoint import ROOT
from tierfs.plugs import announce, checked_url, is_ours, say_files_loaded
from tierfs.train.optimizers import as_saved
from tierfs.train.position import generators, reseed, set_generators
from tierfs.train.values import pack, unpack

BEST = "best.json"  # in a run's directory: it names the best checkpoint to a later process
GRACE_S = 30.0  # for the last save after SIGTERM to reach this host's disk
_COMMIT = f"/{ROOT}"
_GENERATORS = "tierfs_generators"


class TierCheckpointIO(TorchCheckpointIO):
    """Saves a checkpoint as one file in a store. `TierCheckpoint` brings it along; Fabric takes it in ``plugins``.

    ``ack`` is the level at which a save returns; ``None`` for the configured one. ``options`` are those of the
    filesystem. A path that is no tierfs URL, such as that of Slurm's requeue, goes where it always went.
    """

    def __init__(self, *, ack: str | None = "staged", **options: Any) -> None:
        self.options = {**({"ack": ack} if ack else {}), **options}

    def place(self, url: Any, **options: Any) -> tuple[Any, str]:
        """Return the filesystem of a URL, and the path there. The options count for tierfs URLs."""
        used = {**self.options, **options} if is_ours(url) else {}
        found: tuple[Any, str] = fsspec.url_to_fs(os.fspath(url), **used)
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save what ``torch.save`` takes. The file appears whole, or the path keeps its content."""
        if not is_ours(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        fs, name = self.place(path, **(storage_options or {}))
        with fs.open(name, "wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load as ``torch.load`` does, by default into CPU memory. Raises `NotFoundError` or `CorruptionError`."""
        begun = time.monotonic()
        fs, name = self.place(path)
        with fs.open(name, "rb") as file:
            loaded: dict[str, Any] = torch.load(file, map_location=map_location or "cpu", weights_only=weights_only)
        if is_ours(path):
            self.say(path, "", loaded, begun)
        return loaded

    def say(self, url: Any, commit: str, loaded: Any, begun: float) -> None:
        """Say what rank 0 loaded since a monotonic time. ``commit`` is the path of the file that completes a directory."""
        if getattr(rank_zero_only, "rank", 0) == 0:
            fs, name = self.place(url)
            step = loaded.get("global_step", loaded.get("step")) if isinstance(loaded, dict) else None
            say_files_loaded(fs, os.fspath(url), step, [name + commit], begun)

    def remove_checkpoint(self, path: Any) -> None:
        fs, name = self.place(path)
        with contextlib.suppress(FileNotFoundError):
            fs.rm(name, recursive=True)


class TierCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` whose directory ``dirpath`` is in a store. It sets the trainer's ``CheckpointIO`` too.

    ``ckpt_path="last"`` finds the newest complete checkpoint of the directory, and ``ckpt_path="best"`` the best one, in
    a new process too. The callback removes only checkpoints that it saved, or that the run saved which it resumed, and
    none with the name of the one that it resumed from. After SIGTERM all ranks save at the same step, and training ends.

    ``ack`` and ``options`` are those of `TierCheckpointIO`, and ``kwargs`` those of `ModelCheckpoint`.
    """

    def __init__(
        self, dirpath: Any, *, ack: str | None = "staged", options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._io, self._best = TierCheckpointIO(ack=ack, **(options or {})), ""
        self._is_fitting = self._is_terminated = False
        self._own: set[str] = set()
        self._generators: Sequence[str] = ()
        super().__init__(checked_url(dirpath).rstrip("/"), **kwargs)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return the URL of the newest complete checkpoint: of a directory, that of its ``.metadata``, with its time."""
        fs, path = self._io.place(self.dirpath)
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for each in fs.ls(path, detail=True):
                if not each["name"].endswith(self.FILE_EXTENSION):
                    continue
                name = each["name"] + ("" if each["type"] == "file" else _COMMIT)
                with contextlib.suppress(FileNotFoundError):
                    found[fs.unstrip_protocol(name)] = fs.modified(name)
        return {max(found, key=found.__getitem__)} if found else set()

    @property
    def best_model_path(self) -> str:
        """The URL of the best checkpoint of this run; before training, that of the last run in the directory."""
        if self._best or self._is_fitting:
            return self._best
        fs, path = self._io.place(f"{self.dirpath}/{BEST}")
        with contextlib.suppress(FileNotFoundError):
            return str(parse_object(fs.cat_file(path), path).get("best", ""))
        return ""

    @best_model_path.setter
    def best_model_path(self, url: str) -> None:
        self._best = url

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy, is_sharded = trainer.strategy, isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy))
        if is_sharded and not isinstance(strategy, _Sharded):
            name = type(strategy).__name__
            raise InvalidInputError(f"{name} saves to local paths alone: give strategy=Tier{name}(...) of this plug")
        if is_sharded:
            strategy.tier = strategy.checkpoint_io = self._io
        elif type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = self._io
        if stage == "fit":
            self._is_fitting = True
            if trainer.is_global_zero:
                announce("checkpoints", self.dirpath, self._io.options.get("ack"))
        super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        texts = [pack(generators())] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(texts, texts[0])
        checkpoint[_GENERATORS] = texts

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Check that all ranks resume from the same checkpoint: hosts may see files that others do not have yet."""
        self._generators = checkpoint.get(_GENERATORS, ())
        mine = str(trainer.ckpt_path), checkpoint.get("global_step")
        if (first := trainer.strategy.broadcast(mine)) != mine:
            raise ConflictError(
                f"rank {trainer.global_rank} resumes from {mine}, but rank 0 from {first}: run `tierfs wait "
                f"{self.dirpath}` on the hosts of the last run, and start again"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        saved, self._generators = self._generators, ()  # last, before the data loader draws numbers
        if len(saved) == trainer.world_size:
            set_generators(unpack(saved[trainer.global_rank], _GENERATORS))
        elif saved:
            rank_zero_info("tierfs: another number of ranks saved this: random generators are seeded, not restored")
            reseed(str(trainer.ckpt_path), trainer.global_rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("dirpath") == self.dirpath:
            self._own |= {*self.best_k_models, self.last_model_path, self._best}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if isinstance(trainer.strategy, _Sharded):
            trainer.strategy.writer(self.dirpath).prepare([trainer.model, trainer.optimizers])
        self._is_terminated = False
        # Lightning's handler calls a collective wherever the signal meets a rank. Its teardown resets this one, too.
        with contextlib.suppress(ValueError):  # not the main thread: Lightning has no handler there, either
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_terminated", True))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.strategy.reduce_boolean_decision(self._is_terminated, all=False):
            raise SIGTERMException(128 + signal.SIGTERM)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.save_on_exception |= isinstance(exception, SIGTERMException)
        super().on_exception(trainer, pl_module, exception)
        fs, path = self._io.place(self.dirpath)
        try:
            fs.wait(path, "local", timeout=GRACE_S)
        except (TierfsError, TimeoutError) as error:
            rank_zero_info(f"tierfs: {self.dirpath} did not reach the level local: {error}")

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._own.add(filepath)
        if trainer.is_global_zero and self._best:
            fs, path = self._io.place(f"{self.dirpath}/{BEST}")
            fs.pipe_file(path, json.dumps({"best": self._best}).encode())

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        resumed = str(trainer.ckpt_path or "").removesuffix(_COMMIT)
        is_resumed = posixpath.basename(previous) == posixpath.basename(resumed)  # URLs may name a store in two ways
        return previous != current and previous in self._own and not is_resumed


class _Sharded:
    """A strategy whose checkpoints are directories in a store: one file of each rank, complete or absent."""

    tier = TierCheckpointIO()  # options of saves and loads
    _writer: TierWriter | None = None
    broadcast: Any
    is_global_zero: bool

    def write(self, url: Any, state: dict[str, Any], rest: Any) -> None:
        """Save sharded values, and the other values of rank 0. A collective."""
        url = checked_url(self.broadcast(url))
        writer = self.writer(url)
        buffer = io.BytesIO()
        torch.save(rest if self.is_global_zero else None, buffer)
        # Any rank may be the one that saves a value which all have.
        state["rest"] = self.broadcast(buffer.getvalue())
        dcp.save(state, storage_writer=writer, checkpoint_id=url)

    def writer(self, url: Any) -> TierWriter:
        """Return the one writer of all saves, which knows what other ranks save. A collective at its first call."""
        if self._writer is None:
            self._writer = TierWriter(checked_url(self.broadcast(url)), **{"ack": None, **self.tier.options})
        return self._writer

    def read(
        self, url: Any, name: str, module: Any, optimizers: Mapping[str, Any], strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load a model, saved under a name, and its optimizers. Return the values of rank 0. A collective."""
        url, begun = checked_url(self.broadcast(url)).removesuffix(_COMMIT), time.monotonic()
        state = {name: get_model_state_dict(module), "rest": b""}
        state |= {each: get_optimizer_state_dict(module, optimizer) for each, optimizer in optimizers.items()}
        # By default torch takes the checkpoint for an old one if a rank has no part of a tensor of FSDP 1.
        planner = TierLoadPlanner(flatten_sharded_tensors=False, allow_partial_load=not strict)
        dcp.load(state, storage_reader=TierReader(url, **self.tier.options), planner=planner)
        options = StateDictOptions(strict=strict)
        set_model_state_dict(module, state[name], options=options)
        for each, optimizer in optimizers.items():
            with as_saved(optimizer):
                set_optimizer_state_dict(module, optimizer, state[each], options=options)
        rest: dict[str, Any] = torch.load(io.BytesIO(state["rest"]), weights_only=weights_only)
        self.tier.say(url, _COMMIT, rest, begun)
        return rest


class _TrainerStrategy(_Sharded):
    model: Any
    optimizers: Any
    lightning_module: Any

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self.model))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not is_ours(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]  # of Lightning's class
            return
        state = {"model": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{at}": each for at, each in enumerate(checkpoint.pop("optimizer_states", ()))}
        self.write(filepath, state, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if not is_ours(checkpoint_path):
            return dict(super().load_checkpoint(checkpoint_path, weights_only))  # type: ignore[misc]  # as above
        strict = self.lightning_module.strict_loading
        optimizers = {f"optimizer_{at}": each for at, each in enumerate(self.optimizers)}
        return self.read(checkpoint_path, "model", self.model, optimizers, strict, weights_only)


class _FabricStrategy(_Sharded):
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        if filter is not None:
            raise InvalidInputError("sharded checkpoints take no filter: leave the values out of the state")
        model, module, optimizers, rest = _sorted(state)
        values = {model: get_model_state_dict(module)}
        values |= {name: get_optimizer_state_dict(module, each) for name, each in optimizers.items()}
        rest = {name: each.state_dict() if hasattr(each, "state_dict") else each for name, each in rest.items()}
        self.write(path, values, rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        model, module, optimizers, rest = _sorted(state)
        found = self.read(path, model, module, optimizers, strict, weights_only)
        if strict and (missing := rest.keys() - found.keys()):
            raise InvalidInputError(f"{os.fspath(path)} has no {', '.join(sorted(missing))}")
        state.update((name, found.pop(name)) for name in rest.keys() & found.keys())
        return found


def _sorted(state: Any) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    """Return the model's name, the model, the optimizers and the other values of a state of Fabric."""
    values = state if isinstance(state, dict) else {}
    models = [(name, each) for name, each in values.items() if isinstance(each, torch.nn.Module)]
    if len(models) != 1:
        raise InvalidInputError(f"the state has {len(models)} models: give a dict with one, {{'model': model, ...}}")
    optimizers = {name: each for name, each in values.items() if isinstance(each, torch.optim.Optimizer)}
    rest = {name: each for name, each in values.items() if name != models[0][0] and name not in optimizers}
    return *models[0], optimizers, rest


class TierModelParallelStrategy(_TrainerStrategy, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) that saves to a store. A load may have other ranks."""


class TierFSDPStrategy(_TrainerStrategy, FSDPStrategy):
    """`FSDPStrategy` that saves to a store."""


class FabricModelParallelStrategy(_FabricStrategy, fabric.ModelParallelStrategy):
    """Fabric's `ModelParallelStrategy` that saves to a store."""


class FabricFSDPStrategy(_FabricStrategy, fabric.FSDPStrategy):
    """Fabric's `FSDPStrategy` that saves to a store."""
