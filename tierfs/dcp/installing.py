"""`install`: stock ``dcp.save``, ``async_save`` and ``load`` use tierfs's writer, reader and planner for tierfs's URLs.

torch has a fixed list of what a ``checkpoint_id`` may be. So `install` replaces some functions of torch, in every
module that refers to them by name:

- ``_storage_setup`` chooses writer and reader.
- ``_load_state_dict`` chooses the planner of a load.
- ``async_save`` chooses the stager before a writer exists. In process mode the writer that is created here
  goes to the process that saves, so that process needs no `install`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tierfs.dcp.planner import TierLoadPlanner
from tierfs.dcp.reader import TierReader
from tierfs.dcp.save.plan import sizes_of
from tierfs.dcp.writer import TierWriter
from tierfs.errors import InvalidInputError

_PACKAGE = "torch.distributed.checkpoint"
_KNOWN = "2.11 to 2.14"
_SETUP = ("storage", "checkpoint_id", "reader")
_HOOKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("_storage_utils", "_storage_setup", _SETUP),
    ("state_dict_saver", "_storage_setup", _SETUP),
    ("state_dict_loader", "_storage_setup", _SETUP),
    ("state_dict_loader", "_load_state_dict", ("state_dict", "storage_reader", "planner")),
    ("state_dict_saver", "async_save", ("state_dict", "checkpoint_id", "storage_writer")),
)
_lock = threading.Lock()
_replaced: list[tuple[Any, Any]] = []


def install() -> None:
    """Make stock DCP calls use `TierWriter` and `TierReader` for a ``checkpoint_id`` that begins with ``tierfs:``.

    Idempotent. ``TIERFS_DCP=1`` calls this when torch is imported.

    ``tierfs::/absolute/path`` and ``tierfs::relative/path`` are paths of this host; torch alone takes them for local
    directories of that name. A save returns at the configured level (``ack``), not at `TierWriter`'s own
    default. A load without a planner gets a `TierLoadPlanner`. A writer, reader, stager or planner that the
    caller passes is used as before. Other ids are not affected.

    Raises:
        InvalidInputError: This torch lacks a function that has to be replaced. Nothing was replaced.
    """
    with _lock:
        if _replaced:
            return
        found = {(module, name): _look_up(module, name, names) for module, name, names in _HOOKS}
        setup = found["_storage_utils", "_storage_setup"]
        if {found[module, "_storage_setup"] for module in ("state_dict_saver", "state_dict_loader")} != {setup}:
            raise _unknown(
                f"{_PACKAGE}.state_dict_saver and .state_dict_loader do not use _storage_utils._storage_setup"
            )
        for old, new in (
            (setup, _setup(setup)),
            (load := found["state_dict_loader", "_load_state_dict"], _load(load)),
            (save := found["state_dict_saver", "async_save"], _async_save(save)),
        ):
            _replace(old, new)
            _replaced.append((old, new))


def uninstall() -> None:
    """Undo `install`, if it was called."""
    with _lock:
        while _replaced:
            old, new = _replaced.pop()
            _replace(new, old)


class _InstalledReader(TierReader):
    """A reader that `install` created for a URL: for it, `install` chooses the planner too."""


def _is_ours(checkpoint_id: Any) -> bool:
    return isinstance(checkpoint_id, (str, os.PathLike)) and TierWriter.validate_checkpoint_id(checkpoint_id)


def _writer(checkpoint_id: str | os.PathLike[str]) -> TierWriter:
    return TierWriter(checkpoint_id, ack=None)


def _setup(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if storage or not _is_ours(checkpoint_id):
            return stock(storage, checkpoint_id, reader)
        return _InstalledReader(checkpoint_id) if reader else _writer(checkpoint_id)

    return storage_setup


def _load(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        reader = given["storage_reader"]
        if not isinstance(reader, _InstalledReader):
            return stock(**given)
        given["planner"] = given.get("planner") or TierLoadPlanner()
        loaded = stock(**given)
        _loaded[:] = [(reader.checkpoint_id, sizes_of(given["state_dict"]))]
        return loaded

    return load_state_dict


def _prepare_loaded(*_: Any) -> None:
    """Make memory for saves of the state that was loaded last: an optimizer made a step, so this process trains."""
    while _loaded:
        url, sizes = _loaded.pop()
        _writer(url)._prepare(*sizes)


_loaded: list[tuple[str, tuple[int, int]]] = []
register_optimizer_step_post_hook(_prepare_loaded)  # torch refuses to remove a hook while it runs


def _async_save(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def async_save(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("storage_writer") and _is_ours(kwargs.get("checkpoint_id")):
            writer = _writer(kwargs["checkpoint_id"])
            kwargs.update(storage_writer=writer, checkpoint_id=writer.checkpoint_id)
        return stock(*args, **kwargs)

    return async_save


def _look_up(module: str, name: str, parameters: tuple[str, ...]) -> Any:
    path = f"{_PACKAGE}.{module}"
    try:
        function = getattr(importlib.import_module(path), name)
        there = inspect.signature(function).parameters
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _unknown(f"there is no function {path}.{name}") from error
    if not there.keys() >= set(parameters):
        raise _unknown(f"{path}.{name} takes {', '.join(there)}, not {', '.join(parameters)}")
    return function


def _unknown(problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"tierfs.dcp.install() (TIERFS_DCP=1) cannot change torch {torch.__version__}: {problem}. It is known to work "
        f"with torch {_KNOWN}; with other versions pass storage_writer=TierWriter(url) and "
        "storage_reader=TierReader(url)"
    )


def _replace(old: Any, new: Any) -> None:
    """Replace a function in every loaded module that refers to it."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
