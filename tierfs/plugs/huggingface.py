"""`TierCallback`: the checkpoints of a Hugging Face `Trainer` in a store. `attach`: those of an `Accelerator`.

`save_pretrained` and `from_pretrained` take URLs.

The callback makes its trainer save through `tierfs.train.Manager`, at the moments that the trainer's arguments name. A
checkpoint of an unsharded model is also a directory that the ``from_pretrained`` of transformers or peft reads.
"""

from __future__ import annotations

import dataclasses
import glob
import inspect
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import safetensors.torch
import torch
from torch import nn
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
from tierfs.train import Best, Every, Latest, Manager, Preemption, Restored, SaveHandle, TrainState
from tierfs.train.position import generators, set_generators
from tierfs.train.state import Wanted
from tierfs.train.values import pack, unpack

INDEX = "model.safetensors.index.json"
PROGRESS = "extra.trainer"
"""The name of the saved value that holds the trainer's own state."""
SECTIONS = re.compile(r"(optimizer|scheduler|scaler|extra|tierfs|rank_\d+)(\.|$)")
"""The saved values that are no tensors of the model. Those keep the names that transformers gives them."""
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
_SMALL = re.compile("Tokenizer|Processor|Extractor|Config")
_NO_MODEL = re.compile(r"/(rank-[^/]*\.safetensors|model\.safetensors\.index\.json|\.[^/]*)$")
"""The files of a checkpoint that are not copied for ``from_pretrained``."""
_STEP = re.compile(r"(?:step_|checkpoint-)?(\d+)/?")
_FILES_MAX = 3
"""Saves whose files are kept: two saves may be in flight."""
_logger = logging.getLogger("tierfs.plugs")


class TierCallback(TrainerCallback):
    """Saves and resumes the checkpoints of a `Trainer` in a store: ``Trainer(..., callbacks=[TierCallback(url)])``.

    ``trainer.train()`` resumes at the newest step that every rank can load. ``resume_from_checkpoint`` takes a step, its
    URL, or a local checkpoint of `Trainer`; ``True`` requires a checkpoint, and ``False`` requires that there is none.
    The callback sets ``save_strategy`` to ``"no"``: the trainer writes no checkpoint into ``output_dir``.

    After SIGTERM or SIGUSR1, all ranks save at the same step and stop. After SIGTERM, ``train`` then raises
    ``SystemExit(143)``.

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
        self.url = os.fspath(url).rstrip("/")
        self.ack = ack
        self._save = None if save is None else list(save)
        self._keep = keep
        self._options = options
        self._trainer: Any = None
        self._strategy = SaveStrategy.NO
        self._total_limit: int | None = None

    def attach(self, trainer: Any) -> None:
        """Let a trainer save here. Needed only if the callback was added after the trainer was made.

        Raises:
            InvalidInputError: The trainer has another `TierCallback`, or an argument that contradicts this one.
        """
        if isinstance(trainer, _TierTrainer):
            raise InvalidInputError("the trainer has two TierCallbacks: give it one")
        args = trainer.args
        for problem, is_there in (
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
        save, keep = self._save, self._keep
        if save is None:
            save = [Preemption(), *([Every(minutes=20)] if self._strategy == SaveStrategy.NO else [])]
        if keep is None:
            keep = [Latest(self._total_limit)] if self._total_limit else []
        by_tier = dict(keep) if isinstance(keep, Mapping) else {"object": list(keep)}
        if args.load_best_model_at_end and by_tier.get("object"):
            name, mode = args.metric_for_best_model, "max" if args.greater_is_better else "min"
            best = Best(1, name if name.startswith("eval_") else f"eval_{name}", mode)
            by_tier["object"] = [*by_tier["object"], best]
        return Manager(self.url, save=save, keep=by_tier, ack=self.ack, files=files, **self._options)

    def wants(self, args: Any, state: Any, *, is_best: bool, ends_epoch: bool) -> bool:
        """Return whether the trainer's own arguments ask for a save at this step."""
        by_strategy = {"steps": state.global_step % state.save_steps == 0, "epoch": ends_epoch, "best": is_best}
        is_due = self._save is None and by_strategy.get(self._strategy.value, False)
        return is_due or (is_best and args.load_best_model_at_end)

    def say(self, state: Any, found: Restored | None) -> None:
        """Say where checkpoints go, at which level and when. Called once a training, on rank 0."""
        rhythm = {"steps": f"every {state.save_steps} steps", "epoch": "every epoch", "best": "at each best metric"}
        when = rhythm.get(self._strategy.value, "every 20 minutes") if self._save is None else f"by {self._save}"
        begun = "a new run" if found is None else f"resumed at step {found.step}"
        _logger.warning(
            "checkpoints go to %s at the level %s, %s, and none into output_dir: %s", self.url, self.ack, when, begun
        )

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the trainer that is being made. Raises as `attach` does."""
        frame = inspect.currentframe()  # no argument of a callback leads to the trainer
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is not None:
            self.attach(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the callback is attached. Raises `InvalidInputError` if it is not."""
        if self._trainer is None:
            raise InvalidInputError("TierCallback was added after the trainer was made: call its attach(trainer) first")
        self._trainer.tierfs_begin()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Note the metrics, which the next save records."""
        if self._trainer is not None:
            numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
            self._trainer.tierfs_metrics.update(numbers)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that what follows is the end of an epoch, and leave the grace period after a signal to the save."""
        self._trainer.tierfs_ends_epoch = True
        if self._trainer.tierfs_manager.stopping:
            control.should_evaluate = control.should_log = False


class _OtherStep(Exception):  # noqa: N818 - no error: training begins again with that step
    """The step that could be loaded as a whole, its argument, is older than the one with which training began."""


class _TierTrainer(Trainer):
    """The part of a trainer's class that `TierCallback.attach` adds. ``super()`` is the trainer's own class.

    The trainer calls its methods for a local checkpoint as if the URL of a step were one: these methods take its place.

    Attributes:
        tierfs: The callback.
        tierfs_manager: The manager of the training that runs.
        tierfs_metrics: The metrics of evaluations since the last step that the manager got.
        tierfs_ends_epoch: Whether an epoch is at its end.
    """

    tierfs: TierCallback
    tierfs_manager: Manager
    tierfs_metrics: dict[str, float] = {}  # noqa: RUF012 - each training gets its own
    tierfs_ends_epoch = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = resume_from_checkpoint
        is_local = isinstance(given, (str, os.PathLike)) and os.path.isdir(given)
        self._files: dict[int, tuple[dict[str, bytes], list[str]]] = {}
        self._constant: dict[str, bytes] | None = None
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

    # -- resuming ------------------------------------------------------------------------------------------------------

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
            _logger.warning(
                "a step has %d samples now and had %d before: the data goes on at another sample. Change "
                "gradient_accumulation_steps or per_device_train_batch_size", now, then,
            )  # fmt: skip
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
            _logger.warning("%s is not restored exactly: %s", checkpoint, "; ".join(restored.notes))
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

    # -- saving --------------------------------------------------------------------------------------------------------

    def tierfs_begin(self) -> None:
        """Begin a training, whose parts are all there now."""
        self._state = _TrainerParts(self)
        self.tierfs_metrics, self.tierfs_ends_epoch = {}, False
        if self.args.process_index == 0:
            self.tierfs.say(self.state, self._found)

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
        self._last = saved or self._last
        self._acted, self._wants = step, False
        self.tierfs_metrics, self.tierfs_ends_epoch = {}, False
        control.should_training_stop |= manager.stopping

    def tierfs_progress(self) -> str:
        """Return the trainer's own state as JSON. A collective."""
        self.store_flos()
        stateful = [
            each for each in (*self.callback_handler.callbacks, self.control) if isinstance(each, ExportableState)
        ]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        batch = self.get_total_train_batch_size(self.args)
        return json.dumps({"state": dataclasses.asdict(self.state), "batch": batch})

    def tierfs_files_of(self, step: int, values: Mapping[str, Any]) -> None:
        """Collect the files that make a checkpoint with these tensors of the model one for ``from_pretrained``."""
        if self.args.process_index != 0:
            return
        if self._constant is None:
            self._constant = _constant_files(self.model, self.processing_class)
        files, names = dict(self._constant), list(values)
        if any(isinstance(each, DTensor) for each in values.values()) or not hasattr(self.model, "config"):
            names = []  # no file of the checkpoint has a whole tensor
        elif hasattr(self.model, "peft_config"):
            from peft import get_peft_model_state_dict  # noqa: PLC0415 - it is there, because the model is its

            tensors = {name: each.contiguous() for name, each in get_peft_model_state_dict(self.model).items()}
            files["adapter_model.safetensors"], names = safetensors.torch.save(tensors, {"format": "pt"}), []
        self._files = dict([*self._files.items(), (step, (files, names))][-_FILES_MAX:])

    def _files_beside(self, step: int, places: Mapping[str, str]) -> dict[str, bytes]:
        files, names = self._files.pop(step)
        if names:
            index = {"metadata": {}, "weight_map": {name: places[name] for name in names}}
            files[INDEX] = json.dumps(index).encode()
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
        model = saved_of(self.model, values.pop("model"))
        self._trainer.tierfs_files_of(step, model)
        return {**model, **values}, said

    def to_load(self, wanted: Wanted) -> dict[str, Any]:
        values = super().to_load(wanted)
        return {**saved_of(self.model, values.pop("model")), **values}

    def loaded(self, values: Mapping[str, Any], wanted: Wanted) -> list[str]:
        model = get_model_state_dict(self.model)
        model |= {name: values[name] for name in model.keys() & values.keys()}
        return super().loaded({**values, "model": model}, wanted)


def saved_of(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a model's state dict that a checkpoint has.

    Of several names of one parameter, it has the first one. Of a model with an adapter, it has no frozen parameters:
    the program takes them from elsewhere.

    Raises `InvalidInputError` if a tensor has a name that the checkpoint needs for something else.
    """
    seen: set[int] = set()
    found = dict(values)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_base = hasattr(model, "peft_config") and not parameter.requires_grad
        if is_base or id(parameter) in seen:
            found.pop(_WRAPPERS.sub("", name), None)
        seen.add(id(parameter))
    taken = next(filter(SECTIONS.match, found), None)
    if taken is not None:
        raise InvalidInputError(f"the model has a tensor {taken!r}, whose name the checkpoint needs: rename it")
    return found


def _constant_files(model: Any, processing: Any) -> dict[str, bytes]:
    """Return the files of a model's configuration and of its tokenizer or processor, by name."""
    configs = [getattr(model, "config", None), getattr(model, "generation_config", None), processing]
    if hasattr(model, "peft_config"):
        configs = [model.peft_config[model.active_adapter], processing]
    with TemporaryDirectory() as folder:  # a tokenizer writes to a disk only
        for each in configs:
            if hasattr(each, "save_pretrained"):
                each.save_pretrained(folder)
        found = (path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


# -- Accelerate --------------------------------------------------------------------------------------------------------


def attach(accelerator: Any, url: str, *, ack: str = "staged", **options: Any) -> Manager:
    """Let ``accelerator.save_state`` and ``load_state`` use a store. A collective, after ``prepare``.

    ``save_state(12)`` saves step 12, and ``save_state()`` the next one. It returns at the level ``ack``. ``load_state()``
    loads the newest step, and ``load_state(12)`` that one. It raises if a random state is not there, which Accelerate
    itself only logs. Data loaders come back with their epoch, seed and generator, stateful ones with their position.

    Returns the `tierfs.train.Manager`, which takes the other arguments. Close it at the end. Raises `InvalidInputError`
    if the accelerator uses DeepSpeed, Megatron or FSDP 1.
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

    def load_state(input_dir: Any = None, **_: Any) -> None:
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

    accelerator.save_state, accelerator.load_state = save_state, load_state
    return manager


def _state_of(accelerator: Any) -> TrainState:
    models = [accelerator.unwrap_model(each) for each in accelerator._models]
    loaders = accelerator._dataloaders
    orders = [(each.iteration, getattr(each.get_sampler(), "initial_seed", None), _drawn(each)) for each in loaders]
    return TrainState(
        model=models[0] if len(models) == 1 else nn.ModuleList(models),
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


def _drawn(loader: Any) -> torch.Tensor | None:
    generator = getattr(loader, "synchronized_generator", None)
    return None if generator is None else generator.get_state()


def _step_of(given: Any, url: str) -> int:
    """Return a step that is given as a number, a name or a URL below ``url``."""
    match = _STEP.fullmatch(str(given).removeprefix(f"{url}/"))
    if match is None:
        raise InvalidInputError(f"{given!r} is no step of {url}: give one, such as 500")
    return int(match[1])


# -- models without a trainer ------------------------------------------------------------------------------------------


def save_pretrained(part: Any, url: str, **options: Any) -> None:
    """Save a model, tokenizer or processor to a URL, as its ``save_pretrained`` does to a directory.

    It is written to a temporary directory first, and published file by file, ``config.json`` last. ``options`` are those
    of its ``save_pretrained``. Raises `TierfsError` if a file cannot be stored.
    """
    fs, path = fsspec.url_to_fs(url)
    with TemporaryDirectory() as folder:
        part.save_pretrained(folder, **options)
        files = [each for each in Path(folder).rglob("*") if each.is_file()]
        for each in sorted(files, key=lambda each: (each.name == "config.json", each)):
            fs.put_file(str(each), f"{path}/{each.relative_to(folder).as_posix()}")


def from_pretrained(kind: Any, url: str, **options: Any) -> Any:
    """Load a model, tokenizer or processor from a URL: a directory, or a checkpoint of `TierCallback`.

    Of a checkpoint, only the tensors of the model are read, whatever the number of ranks that saved them. The files go
    through a temporary directory. ``kind`` is a class with ``from_pretrained``, such as ``AutoModelForCausalLM``, and
    ``options`` are those of its method. Raises `NotFoundError` if there is nothing, or `TierfsError`.
    """
    fs, path = fsspec.url_to_fs(url)
    names = [name for name in fs.find(path) if not _NO_MODEL.search(name)]
    if not names:
        raise NotFoundError(f"{url} has no files of a model: give a directory with config.json, or a step of a run")
    with TemporaryDirectory() as folder:
        for name in names:
            target = Path(folder, name.removeprefix(path).lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(name, str(target))
        needs_weights = not (_SMALL.search(kind.__name__) or Path(folder, "adapter_config.json").exists())
        if needs_weights and fs.exists(f"{path}/.metadata"):
            checkpoint = open_checkpoint(*Address.of(url, {}).open())
            values = checkpoint.metadata.state_dict_metadata
            for name in list(filter(SECTIONS.match, values)):
                del values[name]
            with Path(folder, SAFE_WEIGHTS_NAME).open("wb") as file:
                file.writelines(safetensors_pieces(checkpoint))
        return kind.from_pretrained(folder, **options)
