"""Hugging Face: `TierCallback` saves a `Trainer` through `tierfs.train.Manager`, and `attach` an `Accelerator`.

A checkpoint of an unsharded model is also a directory that the ``from_pretrained`` of transformers or peft reads.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from tierfs.errors import InvalidInputError
from tierfs.plugs import Total
from tierfs.plugs.accelerate import attach
from tierfs.plugs.pretrained import from_pretrained, save_pretrained
from tierfs.plugs.trainer import Stock, TierTrainer, is_patched
from tierfs.train import Best, Every, Manager, Preemption

__all__ = ["TierCallback", "attach", "from_pretrained", "save_pretrained"]


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
        """Let a trainer that was made without the callback, or got it later, save here. Raises `InvalidInputError`."""
        args = trainer.args
        for problem, is_there in (
            ("the trainer has two of them: give it one", isinstance(trainer, TierTrainer)),
            ("save_only_model=True leaves nothing to resume from: set it to False", args.save_only_model),
            ("enable_jit_checkpoint=True handles the same signals: set it to False", args.enable_jit_checkpoint),
            ("push_to_hub needs hub_strategy='end'", args.push_to_hub and args.hub_strategy != "end"),
            ("DeepSpeed keeps the state in an engine of its own: use FSDP", trainer.is_deepspeed_enabled),
            ("FSDP needs fsdp_config={'version': 2}", trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2),
            ("a method that saves or loads is set on the trainer: override it in its class", is_patched(trainer)),
        ):
            if is_there:
                raise InvalidInputError(f"TierCallback: {problem}")
        self._strategy, self._total_limit = args.save_strategy, args.save_total_limit
        args.save_strategy, args.save_total_limit = SaveStrategy.NO, None
        own = type(trainer)
        kinds: tuple[Any, ...] = (TierTrainer, Stock) if own is Trainer else (TierTrainer, own, Stock)
        trainer.__class__ = type(own.__name__, kinds, {"tierfs_own": own})
        trainer.tierfs = self
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer

    def open(self, args: Any, files: Any) -> Manager:
        """Return the manager for one training with these arguments. A collective. Raises as `Manager` does."""
        often = [Every(minutes=20)] if self._strategy == SaveStrategy.NO else []
        save = [Preemption(), *often] if self._save is None else self._save
        best = None
        if args.load_best_model_at_end:
            metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            best = Best(1, metric, "max" if args.greater_is_better else "min")
        keep = self._keep if self._keep is not None else [Total(self._total_limit, best)] if self._total_limit else []
        by_tier = dict(keep) if isinstance(keep, Mapping) else {"object": list(keep)}
        if best is not None and by_tier.get("object"):
            by_tier["object"] = [*by_tier["object"], best]
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
