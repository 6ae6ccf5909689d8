"""The classes that `tierfs.plugs.huggingface.TierCallback` adds to a `Trainer`, to save it through `tierfs.train.Manager`.

The class of the trainer becomes `TierTrainer`, the trainer's own class, `Stock`, in this order. So a method that the own
class overrides is called as ever, and its ``super()`` leads to `Stock`, which writes nothing that tierfs saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from tierfs.checked_json import parse_object
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.plugs import logger, say_loaded
from tierfs.plugs.accelerate import step_of
from tierfs.plugs.pretrained import files_of, names_in, saved_of
from tierfs.plugs.scratch import SECTION, FilesAlone, Scratch, WithFiles, is_foreign
from tierfs.train import Manager, Restored, SaveHandle, TrainState
from tierfs.train.position import generators, set_generators
from tierfs.train.state import Wanted

PROGRESS = "extra.trainer"  # the saved value with the trainer's own state
_HOOKS = ("_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
_LOAD_HOOKS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
"""The methods that write into a local checkpoint, and those that read it. A trainer's class may override them."""


class _OtherStep(Exception):  # noqa: N818 - no error
    """Only an older step could be loaded as a whole: training begins again with that one."""


class TierTrainer(Trainer):
    """The part of a trainer's class that `TierCallback.attach` adds. ``super()`` is the trainer's own class.

    The trainer calls its methods for a local checkpoint with a scratch directory: these methods take its place.
    """

    tierfs: Any  # the `TierCallback`
    control: Any
    tierfs_last: SaveHandle | None
    tierfs_own: type[Trainer]
    tierfs_manager: Manager
    tierfs_metrics: dict[str, float] = {}  # noqa: RUF012 - since the last step; each training gets its own
    tierfs_ends_epoch = False
    tierfs_found: Restored | None = None
    tierfs_scratch: Scratch
    tierfs_parts: _TrainerParts

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = resume_from_checkpoint
        is_local = isinstance(given, (str, os.PathLike)) and os.path.isdir(given)
        self.tierfs_files: dict[int, tuple[dict[str, bytes], list[str]]] = {}
        self.tierfs_found, self.tierfs_last, self.tierfs_load_s = None, None, 0.0
        self.tierfs_wants, self.tierfs_acted = False, -1
        self.tierfs_scratch = Scratch()
        try:
            with self.tierfs.open(self.args, self.tierfs_files_beside) as self.tierfs_manager:
                self.tierfs_step = None if is_local else self.tierfs_chosen(given)
                outcome = super().train(given if is_local else None, *args, **kwargs)
                if self.tierfs_last is not None:
                    self.tierfs_last.wait(self.tierfs.ack)  # raises if the last save failed
                return outcome
        finally:
            self.tierfs_scratch.remove(waits=False)

    def tierfs_chosen(self, given: Any) -> int | None:
        """Return the step that the caller of ``train`` asks for; ``None`` for the newest one."""
        url = self.tierfs.url
        if not isinstance(given, bool):
            return None if given is None else step_of(given, url)
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
            with contextlib.suppress(_OtherStep):
                where = self.tierfs_place() if resume_from_checkpoint is None else resume_from_checkpoint
                return super()._inner_training_loop(batch_size, resume_from_checkpoint=where, **more)

    def tierfs_place(self) -> str | None:
        """Find the step to go on from. Return the scratch directory with its files; ``None`` for a new run."""
        scratch, self.tierfs_found = self.tierfs_scratch, None
        scratch.remove()
        scratch.make()
        progress = FilesAlone(scratch, trainer="")
        only = [PROGRESS, f"{SECTION}.*"]
        self.tierfs_found = self.tierfs_restore(progress, only=only)
        if self.tierfs_found is None:
            scratch.remove()
            return None
        self.tierfs_saved = parse_object(progress.entries["extra"]["trainer"], "the trainer's state", numbers="any")
        # The trainer looks for the best checkpoint on a disk.
        state = json.dumps({**self.tierfs_saved["state"], "best_model_checkpoint": None})
        scratch.run(lambda: scratch.write(TRAINER_STATE_NAME, state.encode()))
        if self.tierfs_overrides("_load_from_checkpoint") and not self.is_fsdp_enabled:
            self._load_from_checkpoint(scratch.path)  # as `Trainer.train` does, before it prepares the model
        return scratch.path

    def tierfs_restore(self, state: Any, only: Iterable[str] = ()) -> Any:
        """Restore the chosen step, as one that was found before requires it. A collective. Raises as `Manager` does."""
        begun, found = time.monotonic(), self.tierfs_found
        restored = self.tierfs_manager.restore(state, step=self.tierfs_step, only=list(only))
        self.tierfs_load_s += time.monotonic() - begun
        if found is not None and restored is not None and restored.step != found.step:
            self.tierfs_step = restored.step
            raise _OtherStep
        return restored

    def tierfs_overrides(self, *names: str) -> bool:
        """Return whether the trainer's class has a method of its own by any of these names."""
        return any(getattr(self.tierfs_own, name) is not getattr(Trainer, name) for name in names)

    def _init_training_state(self, max_steps: int, updates: int, epochs: int, where: Any, trial: Any) -> Any:
        found = super()._init_training_state(max_steps, updates, epochs, where, trial)
        if self.tierfs_found is None:
            return found
        self.state.best_model_checkpoint = self.tierfs_saved["state"]["best_model_checkpoint"]
        self.state.compute_steps(self.args, max_steps)
        if self.state.global_step >= max_steps:
            return epochs, 0  # the training has ended. The trainer itself would make one more step
        now, then = self.get_total_train_batch_size(self.args), self.tierfs_saved["batch"]
        if now != then:
            text = "a step has %d samples now, not %d: change gradient_accumulation_steps to go on at the same sample"
            logger.warning(text, now, then)
        return found

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if self.tierfs_found is not None:
            restored = self.tierfs_found = self.tierfs_restore(_TrainerParts(self))
            if restored.notes and self.args.process_index == 0:
                notes = "; ".join(restored.notes)
                logger.warning("%s/step_%d is not restored exactly: %s", self.tierfs.url, restored.step, notes)
            self.tierfs_generators = generators()
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        super()._load_rng_state(checkpoint)
        if self.tierfs_found is not None:  # the trainer has drawn numbers since, for the batches that it skipped
            set_generators(self.tierfs_generators)
            self.tierfs_scratch.remove()

    def tierfs_begin(self) -> None:
        self.tierfs_parts = _TrainerParts(self)
        self.tierfs_metrics, self.tierfs_ends_epoch = {}, False
        listeners = [getattr(each.on_save, "__func__", each.on_save) for each in self.callback_handler.callbacks]
        self.tierfs_has_hooks = self.tierfs_overrides(*_HOOKS) or any(
            each is not TrainerCallback.on_save for each in listeners
        )
        if self.tierfs_has_hooks:
            self.tierfs_scratch.run(self.tierfs_make_room)
        found, url = self.tierfs_found, self.tierfs.url
        if self.args.process_index == 0:
            configs = () if hasattr(self.model, "peft_config") else ("config", "generation_config")
            parts = [getattr(self.model, name, None) for name in configs]
            self.tierfs_constant = files_of(*parts, self.processing_class)
            begun = "a new run" if found is None else f"resumed at step {found.step}"
            place = "checkpoints go to %s at the level %s, and none into output_dir: %s"
            logger.warning(place, url, self.tierfs.ack, begun)
            if found is not None:
                say_loaded(url, found.step, found.level, found.created_ns / 1e9, self.tierfs_load_s)

    def tierfs_make_room(self) -> None:
        """Remove the scratch directories of a process that was killed.

        Raises:
            InvalidInputError: A checkpoint of the user lies where a later save makes its scratch directory.
        """
        folders = Path(self.args.output_dir).glob("checkpoint-*") if self.args.local_process_index == 0 else ()
        for folder in [each for each in folders if each.name[11:].isdigit() and each.is_dir()]:
            if not is_foreign(folder):
                shutil.rmtree(folder, ignore_errors=True)
            elif int(folder.name[11:]) > self.state.global_step:
                raise InvalidInputError(
                    f"{folder} is there, but hooks will need it: move it, or take another output_dir"
                )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.tierfs_wants = True  # another callback asked for it

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        state = self.state
        is_best = bool(super()._determine_best_metric(metrics, trial))
        if is_best:
            state.best_global_step = state.global_step
            if self.tierfs.wants(self.args, state, is_best=True, ends_epoch=False):
                self.tierfs_wants, state.best_model_checkpoint = True, f"{self.tierfs.url}/step_{state.global_step}"
        return is_best

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        handler: Any = self.callback_handler
        handler.on_save = lambda *given: given[-1]  # other callbacks' saves come below, and call it then
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            del handler.on_save
        self.control.should_save = False
        manager, state, control, ends_epoch = self.tierfs_manager, self.state, self.control, self.tierfs_ends_epoch
        ends = control.should_training_stop or control.should_epoch_stop or float(state.epoch).is_integer()
        if manager.stopping or (ends and not ends_epoch):
            return  # the end of the epoch follows, which may evaluate the model. The save comes after that
        self.tierfs_wants |= control.should_training_stop
        self.tierfs_wants |= self.tierfs.wants(self.args, state, is_best=False, ends_epoch=ends_epoch)
        step, metrics, again = state.global_step, self.tierfs_metrics, self.tierfs_acted == state.global_step
        parts, parts.is_saved = self.tierfs_parts, True
        saved = None if again else manager.step(step, parts, metrics=metrics)
        if self.tierfs_wants and saved is None:
            changed = again and bool(metrics)
            saved = manager.save(step, parts, metrics=metrics, force=changed, overwrite=changed)
        parts.is_saved = False
        if parts.failure is not None:
            raise parts.failure
        if saved is not None and self.tierfs_has_hooks:
            self.tierfs_scratch.remove()
        self.tierfs_last, self.tierfs_acted, self.tierfs_wants = saved or self.tierfs_last, step, False
        self.tierfs_metrics, self.tierfs_ends_epoch = {}, False
        self.control.should_training_stop |= manager.stopping

    def tierfs_hooks(self) -> None:
        """Call what others have for a save. Their files in ``checkpoint-N`` become part of the checkpoint. A collective."""

        def listen() -> None:
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

        if not self.tierfs_has_hooks:
            listen()  # it has an effect on the control
            return
        scratch = self.tierfs_scratch
        scratch.make(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        scratch.run(lambda: super(TierTrainer, self)._save_checkpoint(self.model_wrapped, None))
        scratch.run(listen)
        scratch.take(leave_out={TRAINER_STATE_NAME})

    def tierfs_progress(self) -> str:
        """Return the trainer's own state as JSON. A collective."""
        self.store_flos()
        parts = (*self.callback_handler.callbacks, self.control)
        stateful = [each for each in parts if isinstance(each, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        batch = self.get_total_train_batch_size(self.args)
        state = dataclasses.asdict(self.state)
        state |= {"is_local_process_zero": True, "is_world_process_zero": True}  # each rank sets its own
        return json.dumps({"state": state, "batch": batch})

    def tierfs_files_of(self, step: int, values: Mapping[str, Any]) -> None:
        """Collect the files that make a checkpoint with these tensors of the model one for ``from_pretrained``."""
        if self.args.process_index != 0:
            return
        files, names = dict(self.tierfs_constant), list(values)
        if any(isinstance(each, DTensor) for each in values.values()) or not hasattr(self.model, "config"):
            names = []  # no file of the checkpoint has a whole tensor
        elif hasattr(self.model, "peft_config"):  # the file of an adapter has other names
            files, names = files | files_of(self.model), []
        self.tierfs_files = dict(
            [*self.tierfs_files.items(), (step, (files, names))][-3:]
        )  # two saves may be in flight

    def tierfs_files_beside(self, step: int, places: Mapping[str, str]) -> dict[str, bytes]:
        files, names = self.tierfs_files.pop(step)
        if names:
            index = {"metadata": {}, "weight_map": {name: places[name] for name in names}}
            files["model.safetensors.index.json"] = json.dumps(index).encode()
        return files


class Stock(Trainer):
    """`Trainer` itself, to a class derived from it: ``super()`` of its methods leads here. Nothing big goes to a disk."""

    tierfs_found: Restored | None = None
    tierfs_parts: _TrainerParts
    tierfs_manager: Manager
    tierfs_overrides: Any
    tierfs_restore: Any
    tierfs_saves_to = ""  # the directory that `Trainer` itself fills

    def tierfs_leaves_out(self, directory: Any) -> bool:
        return bool(self.tierfs_saves_to) and str(directory) == self.tierfs_saves_to

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.tierfs_saves_to = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.tierfs_saves_to = ""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        if self.tierfs_leaves_out(output_dir):
            self._save(output_dir)
        else:
            super().save_model(output_dir, _internal_call)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if self.tierfs_found is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self.tierfs_overrides("_load_from_checkpoint"):  # what follows there may use the weights
            self.tierfs_restore(_TrainerParts(self), only=names_in(self.model))

    def _load_best_model(self) -> None:
        if not self.tierfs_manager.stopping:
            step = self.state.best_global_step
            self.tierfs_manager.restore(self.tierfs_parts, step=step, only=names_in(self.model))


def _stock(name: str, is_left_out: Callable[[Stock, Any], bool]) -> None:
    """Give `Stock` a method that calls `Trainer`'s, unless tierfs saves or loads that for this directory."""

    def method(self: Stock, directory: Any = None, *rest: Any, **more: Any) -> None:
        directory = more.pop("output_dir", more.pop("checkpoint", directory))
        if not is_left_out(self, directory):
            getattr(super(Stock, self), name)(directory, *rest, **more)

    setattr(Stock, name, method)


for _name in ("_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"):
    _stock(_name, Stock.tierfs_leaves_out)
for _name in ("_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"):
    _stock(_name, lambda self, _: self.tierfs_found is not None)


class _TrainerParts(WithFiles, TrainState):
    """The state of a trainer. The tensors of its model lie at the top, under the names that ``from_pretrained`` expects.

    Attributes:
        is_saved: Whether the trainer saves now, so that hooks are called before the state is copied.
        failure: What a hook raised then.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(
            model=trainer.model,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            dataloader=None,  # the trainer skips the batches that were trained on
            scaler=getattr(trainer.accelerator, "scaler", None),
            extra={"trainer": ""},
        )
        self._trainer, self.scratch = trainer, trainer.tierfs_scratch
        self.is_saved = False
        self.failure: Exception | None = None

    def to_save(self, step: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.is_saved:
            try:
                self._trainer.tierfs_hooks()
            except Exception as error:
                self.failure = error
                raise
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


def is_patched(trainer: Any) -> bool:
    return any(name in vars(trainer) for name in (*_HOOKS, *_LOAD_HOOKS))
