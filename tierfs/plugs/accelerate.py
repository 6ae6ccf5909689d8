"""Accelerate: `attach` lets ``save_state`` and ``load_state`` of an `Accelerator` use a store."""

from __future__ import annotations

import re
import time
from typing import Any

import torch

from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.plugs import Total, logger, say_loaded
from tierfs.plugs.scratch import SECTION, FilesAlone, Scratch, WithFiles
from tierfs.train import Manager, TrainState
from tierfs.train.values import pack, unpack

STEP = "extra.step"


def attach(accelerator: Any, url: str, *, ack: str = "staged", **options: Any) -> Manager:
    """Let ``accelerator.save_state`` and ``load_state`` use a store. A collective, after ``prepare``.

    ``save_state(12)`` saves step 12, and ``save_state()`` the next one. It returns at the level ``ack``. ``load_state()``
    loads the newest step, ``load_state(12)`` that one; both return its number. They raise if a random state is missing,
    where Accelerate only logs. Data loaders get epoch, seed and generator back, stateful ones their position.

    The hooks of ``register_save_state_pre_hook`` and ``register_load_state_pre_hook`` get a temporary directory. Its files
    are part of the checkpoint, and the load brings them back first. The state of each model is saved and loaded even if
    a hook takes it from its list, so the load gives what was saved, whatever the hook's files keep of it.

    Returns the `Manager`, which takes the options. Close it at the end. Without ``keep``, the ``total_limit`` of the
    project's configuration counts if it names checkpoints itself. Raises `InvalidInputError` for other engines.
    """
    kind = accelerator.distributed_type
    if kind in {"DEEPSPEED", "MEGATRON_LM"} or (kind == "FSDP" and not accelerator.is_fsdp2):
        raise InvalidInputError(f"attach: {kind} keeps its state in an engine of its own: use FSDP 2")
    project = accelerator.project_configuration
    limit = project.total_limit if project.automatic_checkpoint_naming else None
    manager = Manager(url, **{"save": (), "ack": ack, "keep": [Total(limit)] if limit else (), **options})
    manager.prepare({"models": accelerator._models, "optimizers": accelerator._optimizers})
    scratch = Scratch()

    def save_state(output_dir: Any = None, **_: Any) -> str:
        step = accelerator.save_iteration if output_dir is None else step_of(output_dir, url)
        hooks = list(accelerator._save_model_state_pre_hook.values())
        try:
            if hooks:
                models = list(accelerator._models)
                weights = [accelerator.get_state_dict(each, unwrap=False) for each in models if kind != "FSDP"]
                scratch.make(name=f"checkpoint-{step}")
                scratch.run(lambda: [hook(models, weights, scratch.path) for hook in hooks])
                scratch.take()
            handle = manager.save(step, _AcceleratorParts(accelerator, scratch))
        finally:
            scratch.remove(waits=False)  # all ranks were here with their hooks
        handle.wait(ack)
        project.iteration = step + 1
        return handle.url

    def load_state(input_dir: Any = None, **_: Any) -> int:
        step = None if input_dir is None else step_of(input_dir, url)
        hooks = list(accelerator._load_model_state_pre_hook.values())
        begun = time.monotonic()
        try:
            scratch.make()
            while True:
                found = (
                    manager.restore(FilesAlone(scratch, step=0), step=step, only=[STEP, f"{SECTION}.*"])
                    if hooks
                    else None
                )
                if found is not None:
                    models = [each for each in accelerator._models if kind != "FSDP"]
                    scratch.run(lambda: [hook(models, scratch.path) for hook in hooks])  # noqa: B023 - called at once
                state = _AcceleratorParts(accelerator, scratch)
                restored = manager.restore(state, step=step)
                if found is None or restored is None or restored.step == found.step:
                    break
                step = restored.step  # only an older step could be loaded as a whole
            is_used = bool(hooks) or not scratch.has_files
        finally:
            scratch.remove(waits=False)  # as above
        if restored is None:
            raise NotFoundError(f"{url} has no complete checkpoint to load: save_state makes one")
        where = f"{url}/step_{restored.step}"
        if restored.notes:
            raise InvalidInputError(f"{where} is not loaded exactly: {'; '.join(restored.notes)}")
        if accelerator.is_main_process:
            say_loaded(url, restored.step, restored.level, restored.created_ns / 1e9, time.monotonic() - begun)
            if not is_used:
                logger.warning("%s has files of hooks, and no hook is registered that loads them", where)
        project.iteration = restored.step + 1
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


class _AcceleratorParts(WithFiles, TrainState):
    """The state of an accelerator, and the files of its hooks."""

    def __init__(self, accelerator: Any, scratch: Scratch) -> None:
        models = [accelerator.unwrap_model(each) for each in accelerator._models]
        loaders = accelerator._dataloaders
        drawn = [getattr(each, "synchronized_generator", None) for each in loaders]
        orders = [
            (each.iteration, getattr(each.get_sampler(), "initial_seed", None), generator and generator.get_state())
            for each, generator in zip(loaders, drawn, strict=True)
        ]
        super().__init__(
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
        self.scratch = scratch


def step_of(given: Any, url: str) -> int:
    """Return the step that a number, a name or a URL of the run means. Raises `InvalidInputError` if it means none."""
    match = re.fullmatch(r"(?:step_|checkpoint[-_])?(\d+)/?", str(given).removeprefix(f"{url}/"))
    if match is None:
        raise InvalidInputError(f"{given!r} is no step of {url}: give one, such as 500")
    return int(match[1])
