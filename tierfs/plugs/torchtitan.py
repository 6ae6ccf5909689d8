"""torchtitan 0.3: `TierCheckpointManager` saves by policies, and resumes at the newest step that can be loaded."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.tools.logging import logger

from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.plugs import announce, checked_url, say_loaded
from tierfs.train import Every, Latest, Manager, Preemption
from tierfs.train.state import DictState, Wanted

_UNUSED = ("dcp_save", "dcp_load", "_flattened_model_states_sd", "_states_to_load", "_save_last_step", "_should_save")
"""The methods of torchtitan's manager that are not called here, where saves and loads are those of `Manager`."""
_InCode = Annotated[Any, tyro.conf.Suppress]  # no option of the command line


class TierCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager over `tierfs.train.Manager`.

    A save returns when the state is copied, so ``async_mode`` has no effect. The last save of a run that saves the model
    alone (``last_save_model_only``) is a light checkpoint, which no resume takes while there is a full one. A folder
    that has checkpoints of torchtitan's own manager alone is resumed from them. On SIGTERM all ranks save at one step,
    and the process exits with code 143.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and those of `tierfs.train.Manager`.

        Attributes:
            ack: The level at which a save is done.
            grace: The time that a job has after SIGTERM.
            save, keep, options: More save policies, policies in place of ``keep_latest_k``, and other arguments of
                `tierfs.train.Manager`. In code alone.
        """

        ack: Literal["staged", "local", "peer", "object"] = "staged"
        grace: str = "30s"
        save: _InCode = ()
        keep: _InCode = ()
        options: _InCode = field(default_factory=dict)

    manager: Any = None  # the `tierfs.train.Manager` that saves and loads; none if saving is disabled

    def __init__(self, config: Config, *, base_folder: str = "", **parts: Any) -> None:
        changed = [name for name in _UNUSED if getattr(type(self), name) is not getattr(CheckpointManager, name)]
        if changed:
            hint = "put what it adds into the states"
            raise InvalidInputError(f"{type(self).__name__} overrides {changed[0]}, which tierfs does not call: {hint}")
        stock: Any = config
        super().__init__(replace(stock, async_mode="disabled", keep_latest_k=0), base_folder=base_folder, **parts)
        if not self.enable:
            return
        keep = config.keep or ([Latest(config.keep_latest_k)] if config.keep_latest_k else ())
        policies = [Every(steps=config.interval), Preemption(grace=config.grace), *config.save]
        self._ack = config.ack
        self.manager = Manager(checked_url(self.folder), save=policies, keep=keep, ack=config.ack, **config.options)
        announce("checkpoints", self.folder, config.ack)

    @property
    def _state(self) -> _States:
        left_out = {*self.exclude_from_loading, *(name for name, value in self.states.items() if value is None)}
        return _States({name: value for name, value in self.states.items() if name not in left_out}, self.export_dtype)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.load_only:
            return False
        if last_step:
            kind = "light" if self.last_save_model_only else "full"
            self.manager.save(curr_step, self._state, kind=kind).wait(self._ack)
            return True
        saved = self.manager.step(curr_step, self._state)
        if self.manager.stopping:
            self.close()
            raise SystemExit(128 + signal.SIGTERM)
        if saved is None and curr_step == 1 and self.enable_first_step_checkpoint:
            saved = self.manager.save(curr_step, self._state)
        return saved is not None

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        restored, begun = None, time.monotonic()
        with contextlib.suppress(NotFoundError):
            restored = self.manager.restore(self._state, step=None if step < 0 else step)
        if restored is None:
            return bool(super()._load(step))
        for note in restored.notes:
            logger.warning("%s: %s", self.folder, note)
        if not dist.is_initialized() or dist.get_rank() == 0:
            saved_s, seconds = restored.created_ns / 1e9, time.monotonic() - begun
            say_loaded(self.folder, restored.step, restored.level, saved_s, seconds)
        return True

    def _close(self) -> None:
        super()._close()
        if self.manager is not None:
            self.manager.close()


class _States(DictState):
    """torchtitan's states by name. A light checkpoint has the model as exported."""

    def __init__(self, entries: Mapping[str, Any], export_dtype: torch.dtype) -> None:
        super().__init__(entries)
        self._export_dtype = export_dtype

    def _of_kind(self, kind: str) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in self.entries.items() if kind == "full" or name == MODEL)

    def values(self, kind: str) -> dict[str, Any]:
        values = super().values(kind)
        if kind == "light":
            values[MODEL] = {
                name: value.to(self._export_dtype) if torch.is_tensor(value) and value.is_floating_point() else value
                for name, value in values[MODEL].items()
            }
        return values

    def to_load(self, wanted: Wanted) -> dict[str, Any]:
        # torchtitan's container of optimizers is an optimizer to torch, but its state is flat and complete.
        return {
            **{name: value.state_dict() for name, value in self._of_kind(wanted.kind)},
            **self._own_to_load(wanted),
        }
