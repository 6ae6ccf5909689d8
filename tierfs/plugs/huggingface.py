"""Hugging Face: `TierCallback` saves a `Trainer` through `tierfs.train.Manager`, and `attach` an `Accelerator`.

A checkpoint of an unsharded model is also a directory that the ``from_pretrained`` of transformers or peft reads.
"""

from __future__ import annotations

import dataclasses
import glob
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils import SAFE_WEIGHTS_NAME

from tierfs.checkpoint.export import safetensors_pieces
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.plugs import logger
from tierfs.train import Best, Every, Latest, Manager, Preemption, Restored, SaveHandle, TrainState
from tierfs.train.position import generators, set_generators
from tierfs.train.state import Wanted
from tierfs.train.values import pack, unpack

PROGRESS = "extra.trainer"  # the saved value with the trainer's own state
SECTIONS = re.compile(r"(optimizer|scheduler|scaler|extra|tierfs|rank_\d+)(\.|$)")
"""The saved values that are no tensors of the model. Those keep the names that transformers gives them."""
_NO_MODEL = re.compile(r"/(rank-[^/]*\.safetensors|model\.safetensors\.index\.json|\.[^/]*)$")
"""The files of a checkpoint that are not copied for ``from_pretrained``."""


class TierCallback(TrainerCallback):
    """Saves and resumes the checkpoints of a `Trainer` in a store: ``Trainer(..., callbacks=[TierCallback(url)])``.

    ``trainer.train()`` resumes at the newest step that every rank can load. ``resume_from_checkpoint`` takes a step, its
    URL, or a local checkpoint of `Trainer`; ``True`` requires a checkpoint, and ``False`` requires that there is none.
    The callback sets ``save_strategy`` to ``"no"``: the trainer writes no checkpoint into ``output_dir``.

    After SIGTERM or SIGUSR1, all ranks save at one step and stop; after SIGTERM, ``train`` raises ``SystemExit(143)``.

    Args:
        url: The run's directory: any URL that `tierfs.train.Manager` takes. One run at a time uses it.
        save: Policies as for `Manager`. ``None`` follows ``save_strategy`` and ``save_steps``, and adds `Preemption`.
            The last step is saved in any case.
        keep: Policies as for `Manager`. ``None`` follows ``save_total_limit``. With ``load_best_model_at_end``, the best
            step is saved and kept, too.
        ack: The level at which a save is done: ``"staged"``, ``"local"``, ``"peer"`` or ``"object"``.
        **options: More options of `Manager`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        save: Iterable[Any] | None = None,
        keep: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        ack: str = "staged",
        **options: Any,
    ) -> None:
        self.url, self.ack = os.fspath(url).rstrip("/"), ack
        self._save, self._keep, self._options = None if save is None else list(save), keep, options
        self._trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Let a trainer save here, if the callback was added after the trainer was made. Raises `InvalidInputError`."""
        args = trainer.args
        for problem, is_there in (
            ("the trainer has two of them: give it one", isinstance(trainer, _TierTrainer)),
            ("save_only_model=True leaves nothing to resume from: set it to False", args.save_only_model),
            ("enable_jit_checkpoint=True handles the same signals: set it to False", args.enable_jit_checkpoint),
            ("push_to_hub needs hub_strategy='end'", args.push_to_hub and args.hub_strategy != "end"),
            ("DeepSpeed keeps the state in an engine of its own: use FSDP", trainer.is_deepspeed_enabled),
            ("FSDP needs fsdp_config={'version': 2}", trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2),
        ):
            if is_there:
                raise InvalidInputError(f"TierCallback: {problem}")
        self._strategy, self._total_limit = args.save_strategy, args.save_total_limit
        args.save_strategy, args.save_total_limit = SaveStrategy.NO, None
        trainer.__class__ = type(type(trainer).__name__, (_TierTrainer, type(trainer)), {})
        trainer.tierfs = self
        self._trainer = trainer

    def open(self, args: Any, files: Any) -> Manager:
        """Return the manager for one training with these arguments. A collective. Raises as `Manager` does."""
        often = [Every(minutes=20)] if self._strategy == SaveStrategy.NO else []
        save = [Preemption(), *often] if self._save is None else self._save
        keep = self._keep if self._keep is not None else [Latest(self._total_limit)] if self._total_limit else []
        by_tier = dict(keep) if isinstance(keep, Mapping) else {"object": list(keep)}
        if args.load_best_model_at_end and by_tier.get("object"):
            metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            by_tier["object"] = [*by_tier["object"], Best(1, metric, "max" if args.greater_is_better else "min")]
        return Manager(self.url, save=save, keep=by_tier, ack=self.ack, files=files, **self._options)

    def wants(self, args: Any, state: Any, *, is_best: bool, ends_epoch: bool) -> bool:
        """Return whether the trainer's own arguments ask for a save at this step."""
        by_strategy = {"steps": state.global_step % state.save_steps == 0, "epoch": ends_epoch, "best": is_best}
        is_due = self._save is None and by_strategy.get(self._strategy.value, False)
        return is_due or (is_best and args.load_best_model_at_end)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        frame = inspect.currentframe()  # no argument of a callback leads to the trainer
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is not None:
            self.attach(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise InvalidInputError("TierCallback was added after the trainer was made: call its attach(trainer) first")
        self._trainer.tierfs_begin()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._trainer is not None and metrics:
            numbers = {name: each for name, each in metrics.items() if isinstance(each, (int, float))}
            self._trainer.tierfs_metrics.update(numbers)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that what follows is the end of an epoch, and leave the grace period after a signal to the save."""
        self._trainer.tierfs_ends_epoch = True
        if self._trainer.tierfs_manager.stopping:
            control.should_evaluate = control.should_log = False


class _OtherStep(Exception):  # noqa: N818 - no error
    """Only an older step, its argument, could be loaded as a whole: training begins again with that one."""


class _TierTrainer(Trainer):
    """The part of a trainer's class that `TierCallback.attach` adds. ``super()`` is the trainer's own class.

    The trainer calls its methods for a local checkpoint as if the URL of a step were one: these methods take its place.
    """

    tierfs: TierCallback
    tierfs_manager: Manager
    tierfs_metrics: dict[str, float] = {}  # noqa: RUF012 - since the last step; each training gets its own
    tierfs_ends_epoch = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = resume_from_checkpoint
        is_local = isinstance(given, (str, os.PathLike)) and os.path.isdir(given)
        self._files: dict[int, tuple[dict[str, bytes], list[str]]] = {}
        self._found: Restored | None = None
        self._last: SaveHandle | None = None
        self._wants, self._acted = False, -1
        with self.tierfs.open(self.args, self._files_beside) as self.tierfs_manager:
            self._step = None if is_local else self._chosen(given)
            outcome = super().train(given if is_local else None, *args, **kwargs)
            if self._last is not None:
                self._last.wait(self.tierfs.ack)  # raises if the last save failed
            return outcome

    def _chosen(self, given: Any) -> int | None:
        """Return the step that the caller of ``train`` asks for; ``None`` for the newest one."""
        url = self.tierfs.url
        if not isinstance(given, bool):
            return None if given is None else _step_of(given, url)
        newest = self.tierfs_manager.latest()
        if given and newest is None:
            raise NotFoundError(f"{url} has no complete checkpoint to resume from: train without True to begin")
        if not given and newest is not None:
            raise InvalidInputError(f"{url} has step {newest}, which a new run cannot replace: take another URL")
        return None

    def _inner_training_loop(self, batch_size: Any = None, *, resume_from_checkpoint: Any = None, **more: Any) -> Any:
        if more.get("trial") is not None:
            raise InvalidInputError("TierCallback: the trials of a search cannot share one URL: search without it")
        while True:
            where = resume_from_checkpoint
            if where is None:
                progress = {"extra": {"trainer": ""}}
                self._found = self.tierfs_manager.restore(progress, step=self._step, only=[PROGRESS])
                if self._found is not None:
                    where = f"{self.tierfs.url}/step_{self._found.step}"
                    self._progress = json.loads(progress["extra"]["trainer"])
            try:
                return super()._inner_training_loop(batch_size, resume_from_checkpoint=where, **more)
            except _OtherStep as other:
                (self._step,) = other.args

    def _init_training_state(self, max_steps: int, updates: int, epochs: int, where: Any, trial: Any) -> Any:
        if self._found is None:
            return super()._init_training_state(max_steps, updates, epochs, where, trial)
        state = self._progress["state"]
        best = state.pop("best_model_checkpoint")  # the trainer looks for it on a disk
        with TemporaryDirectory() as folder:
            Path(folder, "trainer_state.json").write_text(json.dumps(state))
            found = super()._init_training_state(max_steps, updates, epochs, folder, trial)
        self.state.best_model_checkpoint = state["best_model_checkpoint"] = best
        self.state.compute_steps(self.args, max_steps)
        if self.state.global_step >= max_steps:
            return epochs, 0  # the training has ended. The trainer itself would make one more step
        now, then = self.get_total_train_batch_size(self.args), self._progress["batch"]
        if now != then:
            text = "a step has %d samples now, not %d: change gradient_accumulation_steps to go on at the same sample"
            logger.warning(text, now, then)
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if self._found is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if self._found is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        restored = self.tierfs_manager.restore(_TrainerParts(self), step=self._step)
        assert restored is not None, "its progress was there"
        if restored.step != self._found.step:
            raise _OtherStep(restored.step)
        if restored.notes and self.args.process_index == 0:
            logger.warning("%s is not restored exactly: %s", checkpoint, "; ".join(restored.notes))
        self._generators = generators()

    def _load_scaler(self, checkpoint: Any) -> None:
        if self._found is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._found is None:
            super()._load_rng_state(checkpoint)
        else:  # the trainer has drawn numbers since, for the batches that it skipped
            set_generators(self._generators)

    def _load_best_model(self) -> None:
        if self.tierfs_manager.stopping:
            return
        names = [glob.escape(name) for name in saved_of(self.model, get_model_state_dict(self.model))]
        self.tierfs_manager.restore(self._state, step=self.state.best_global_step, only=names)

    def tierfs_begin(self) -> None:
        self._state = _TrainerParts(self)
        self.tierfs_metrics, self.tierfs_ends_epoch = {}, False
        if self.args.process_index == 0:
            configs = () if hasattr(self.model, "peft_config") else ("config", "generation_config")
            parts = [getattr(self.model, name, None) for name in configs]
            self._constant = _files_of(*parts, self.processing_class)
            begun = "a new run" if self._found is None else f"resumed at step {self._found.step}"
            place = "checkpoints go to %s at the level %s, and none into output_dir: %s"
            logger.warning(place, self.tierfs.url, self.tierfs.ack, begun)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._wants = True  # another callback asked for it

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        state = self.state
        is_best = bool(super()._determine_best_metric(metrics, trial))
        if is_best:
            state.best_global_step = state.global_step
            if self.tierfs.wants(self.args, state, is_best=True, ends_epoch=False):
                self._wants, state.best_model_checkpoint = True, f"{self.tierfs.url}/step_{state.global_step}"
        return is_best

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        manager, state, control, ends_epoch = self.tierfs_manager, self.state, self.control, self.tierfs_ends_epoch
        ends = control.should_training_stop or control.should_epoch_stop or float(state.epoch).is_integer()
        if manager.stopping or (ends and not ends_epoch):
            return  # the end of the epoch follows, which may evaluate the model. The save comes after that
        self._wants |= control.should_training_stop
        self._wants |= self.tierfs.wants(self.args, state, is_best=False, ends_epoch=ends_epoch)
        step, metrics, again = state.global_step, self.tierfs_metrics, self._acted == state.global_step
        saved = None if again else manager.step(step, self._state, metrics=metrics)
        if self._wants and saved is None:
            changed = again and bool(metrics)
            saved = manager.save(step, self._state, metrics=metrics, force=changed, overwrite=changed)
        self._last, self._acted, self._wants = saved or self._last, step, False
        self.tierfs_metrics, self.tierfs_ends_epoch = {}, False
        control.should_training_stop |= manager.stopping

    def tierfs_progress(self) -> str:
        """Return the trainer's own state as JSON. A collective."""
        self.store_flos()
        parts = (*self.callback_handler.callbacks, self.control)
        stateful = [each for each in parts if isinstance(each, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        batch = self.get_total_train_batch_size(self.args)
        return json.dumps({"state": dataclasses.asdict(self.state), "batch": batch})

    def tierfs_files_of(self, step: int, values: Mapping[str, Any]) -> None:
        """Collect the files that make a checkpoint with these tensors of the model one for ``from_pretrained``."""
        if self.args.process_index != 0:
            return
        files, names = dict(self._constant), list(values)
        if any(isinstance(each, DTensor) for each in values.values()) or not hasattr(self.model, "config"):
            names = []  # no file of the checkpoint has a whole tensor
        elif hasattr(self.model, "peft_config"):  # the file of an adapter has other names
            files, names = files | _files_of(self.model), []
        self._files = dict([*self._files.items(), (step, (files, names))][-3:])  # two saves may be in flight

    def _files_beside(self, step: int, places: Mapping[str, str]) -> dict[str, bytes]:
        files, names = self._files.pop(step)
        if names:
            index = {"metadata": {}, "weight_map": {name: places[name] for name in names}}
            files["model.safetensors.index.json"] = json.dumps(index).encode()
        return files


class _TrainerParts(TrainState):
    """The state of a trainer. The tensors of its model lie at the top, under the names that ``from_pretrained`` expects."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(
            model=trainer.model,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            dataloader=None,  # the trainer skips the batches that were trained on
            scaler=getattr(trainer.accelerator, "scaler", None),
            extra={"trainer": ""},
        )
        self._trainer = trainer

    def to_save(self, step: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        self.extra["trainer"] = self._trainer.tierfs_progress()
        values, said = super().to_save(step, kind)
        names = saved_of(self.model, get_model_state_dict(self.model))
        self._trainer.tierfs_files_of(step, {name: values[name] for name in names})
        return values, said

    def values(self, kind: str) -> dict[str, Any]:
        values = super().values(kind)
        return {**saved_of(self.model, values.pop("model")), **values}

    def to_load(self, wanted: Wanted) -> dict[str, Any]:
        values = super().to_load(wanted)
        return {**saved_of(self.model, values.pop("model")), **values}

    def loaded(self, values: Mapping[str, Any], wanted: Wanted) -> list[str]:
        model = get_model_state_dict(self.model)
        model |= {name: values[name] for name in model.keys() & values.keys()}
        return super().loaded({**values, "model": model}, wanted)


def saved_of(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a checkpoint has: each parameter once, of a model with an adapter those that are trained.

    Raises `InvalidInputError` if a tensor has a name that the checkpoint needs for something else.
    """
    seen: set[int] = set()
    found = dict(values)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_base = hasattr(model, "peft_config") and not parameter.requires_grad
        if is_base or id(parameter) in seen:
            found.pop(re.sub(r"(_orig_mod|_checkpoint_wrapped_module)\.", "", name), None)
        seen.add(id(parameter))
    taken = next(filter(SECTIONS.match, found), None)
    if taken is not None:
        raise InvalidInputError(f"the model has a tensor {taken!r}, whose name the checkpoint needs: rename it")
    return found


def _files_of(*parts: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:  # a tokenizer writes to a disk only
        for each in parts:
            if hasattr(each, "save_pretrained"):
                each.save_pretrained(folder)
        return {each.relative_to(folder).as_posix(): each.read_bytes() for each in _files_in(folder)}


def _files_in(folder: str) -> list[Path]:
    return [each for each in Path(folder).rglob("*") if each.is_file()]


def attach(accelerator: Any, url: str, *, ack: str = "staged", **options: Any) -> Manager:
    """Let ``accelerator.save_state`` and ``load_state`` use a store. A collective, after ``prepare``.

    ``save_state(12)`` saves step 12, and ``save_state()`` the next one. It returns at the level ``ack``. ``load_state()``
    loads the newest step, ``load_state(12)`` that one; both return its number. They raise if a random state is missing,
    where Accelerate only logs. Data loaders get epoch, seed and generator back, stateful ones their position.

    Returns the `Manager`, which takes the options. Close it at the end. Raises `InvalidInputError` for other engines.
    """
    kind = accelerator.distributed_type
    if kind in {"DEEPSPEED", "MEGATRON_LM"} or (kind == "FSDP" and not accelerator.is_fsdp2):
        raise InvalidInputError(f"attach: {kind} keeps its state in an engine of its own: use FSDP 2")
    manager = Manager(url, **{"save": (), "ack": ack, **options})

    def save_state(output_dir: Any = None, **_: Any) -> str:
        step = accelerator.save_iteration if output_dir is None else _step_of(output_dir, url)
        handle = manager.save(step, _state_of(accelerator))
        handle.wait(ack)
        accelerator.project_configuration.iteration = step + 1
        return handle.url

    def load_state(input_dir: Any = None, **_: Any) -> int:
        state = _state_of(accelerator)
        restored = manager.restore(state, step=None if input_dir is None else _step_of(input_dir, url))
        if restored is None:
            raise NotFoundError(f"{url} has no complete checkpoint to load: save_state makes one")
        if restored.notes:
            raise InvalidInputError(f"{url}/step_{restored.step} is not loaded exactly: {'; '.join(restored.notes)}")
        accelerator.project_configuration.iteration = restored.step + 1
        accelerator.step = state.extra["step"]
        saved = unpack(state.extra["orders"], "orders")
        for loader, (iteration, seed, drawn) in zip(accelerator._dataloaders, saved, strict=True):
            loader.iteration = iteration
            if seed is not None:
                loader.get_sampler().initial_seed = seed
            if drawn is not None:
                loader.synchronized_generator.set_state(drawn)
        return restored.step

    accelerator.save_state, accelerator.load_state = save_state, load_state
    return manager


def _state_of(accelerator: Any) -> TrainState:
    models = [accelerator.unwrap_model(each) for each in accelerator._models]
    loaders = accelerator._dataloaders
    drawn = [getattr(each, "synchronized_generator", None) for each in loaders]
    orders = [
        (each.iteration, getattr(each.get_sampler(), "initial_seed", None), generator and generator.get_state())
        for each, generator in zip(loaders, drawn, strict=True)
    ]
    return TrainState(
        model=models[0] if len(models) == 1 else torch.nn.ModuleList(models),
        optimizer=[each.optimizer for each in accelerator._optimizers],
        scheduler=[each.scheduler for each in accelerator._schedulers],
        dataloader=[each for each in loaders if getattr(each, "use_stateful_dataloader", False)],
        scaler=accelerator.scaler,
        extra={
            "step": accelerator.step,
            "orders": pack(orders),
            **{f"custom_{number}": each for number, each in enumerate(accelerator._custom_objects)},
        },
    )


def _step_of(given: Any, url: str) -> int:
    match = re.fullmatch(r"(?:step_|checkpoint-)?(\d+)/?", str(given).removeprefix(f"{url}/"))
    if match is None:
        raise InvalidInputError(f"{given!r} is no step of {url}: give one, such as 500")
    return int(match[1])


def save_pretrained(part: Any, url: str, **options: Any) -> None:
    """Save a model, tokenizer or processor to a URL, as its ``save_pretrained`` with these options does to a directory.

    The files go through a temporary directory, ``config.json`` last. Raises `TierfsError` if one cannot be stored.
    """
    fs, path = fsspec.url_to_fs(url)
    with TemporaryDirectory() as folder:
        part.save_pretrained(folder, **options)
        for each in sorted(_files_in(folder), key=lambda each: (each.name == "config.json", each)):
            fs.put_file(str(each), f"{path}/{each.relative_to(folder).as_posix()}")


def from_pretrained(kind: Any, url: str, **options: Any) -> Any:
    """Load a model, tokenizer or processor from a URL: a directory, or a checkpoint of `TierCallback`.

    ``kind`` is a class such as ``AutoModelForCausalLM``, and ``options`` are those of its ``from_pretrained``. The files
    go through a temporary directory. Of a checkpoint, only the model is read. Raises `NotFoundError`, or `TierfsError`.
    """
    fs, path = fsspec.url_to_fs(url)
    names = [name for name in fs.find(path) if not _NO_MODEL.search(name)]
    if not names:
        raise NotFoundError(f"{url} has no files of a model: give a directory with config.json, or a step of a run")
    with TemporaryDirectory() as folder:
        fs.get(names, [f"{folder}/{name.removeprefix(path).lstrip('/')}" for name in names])
        is_small = re.search("Tokenizer|Processor|Extractor|Config", kind.__name__)
        if not is_small and not Path(folder, "adapter_config.json").exists() and fs.exists(f"{path}/.metadata"):
            checkpoint = open_checkpoint(*Address.of(url, {}).open())
            values = checkpoint.metadata.state_dict_metadata
            for name in list(filter(SECTIONS.match, values)):
                del values[name]
            with Path(folder, SAFE_WEIGHTS_NAME).open("wb") as file:
                file.writelines(safetensors_pieces(checkpoint))
        return kind.from_pretrained(folder, **options)
