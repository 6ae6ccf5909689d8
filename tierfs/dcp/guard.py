"""Make code of torch and safetensors for local paths refuse a tierfs URL where no audit hook can.

See `tierfs.urls_as_paths`.

`guard` changes these places. Each change affects only paths that are made of a tierfs URL; for all others it calls the
original:

- ``torch.serialization._is_path``, which ``torch.save`` and ``torch.load`` call before native code opens the file.
- ``torch.distributed.checkpoint.filesystem``: the constructors of ``FileSystemWriter`` and ``FileSystemReader`` (and
  of torch's Hugging Face classes, which derive from them), so that the error comes before a save. ``FsspecWriter``
  and ``FsspecReader`` derive from the two classes as well and are not changed, nor are classes from outside of torch.
- ``serialize_file`` in safetensors, native code that ``save_file``, ``save_model`` and ``save_pretrained`` call.

``import tierfs`` changes the modules that are loaded. A module that is loaded later is changed at the end of its
import. This module imports neither torch nor safetensors itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tierfs.urls_as_paths import refuse, url_in

_CHECKPOINT = "torch.distributed.checkpoint"
_FILESYSTEM = f"{_CHECKPOINT}.filesystem"
_TORCHS_OWN = {_FILESYSTEM, f"{_CHECKPOINT}.hf_storage", f"{_CHECKPOINT}.quantized_hf_storage"}
_WRITE = "dcp.save(state, storage_writer=tierfs.dcp.TierWriter({url!r}))"
_READ = "dcp.load(state, storage_reader=tierfs.dcp.TierReader({url!r}))"
_SAVE = "`with fsspec.open({url!r}, 'wb') as file: torch.save(value, file)`, or torch.load(file) with 'rb'"


def guard() -> None:
    """Make the places above refuse tierfs's URLs. Idempotent."""
    for name, change in _CHANGES.items():
        module = sys.modules.get(name)
        if module is None:
            _waiting.setdefault(name, change)
        elif name not in _done:
            _change(name, module, change)
    if _waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds no module by itself: it makes sure that a module is changed after it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, name)
                return spec
        return None


class _Loader:
    """Loads a module through its own loader, which it restores in the module before the module runs."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        change = _waiting.pop(self._name, None)
        if change is not None:
            _change(self._name, module, change)


def _change(name: str, module: Any, change: Callable[[Any], None]) -> None:
    """Change a module once. If this torch is built differently, its import goes on, and the log says so."""
    _done.add(name)
    try:
        change(module)
    except (AttributeError, TypeError, ValueError) as error:
        import logging  # noqa: PLC0415 - as above

        logging.getLogger("tierfs.dcp").warning(
            "%s of this torch is unknown (%s): it may take a tierfs URL for a local path, so pass it none", name, error
        )


def _check(path: Any, instead: str = "") -> None:
    """Refuse a path that is a tierfs URL.

    Raises:
        InvalidInputError: The path is one.
    """
    if (text := url_in(path)) is not None:
        from tierfs.dcp.address import full_url  # noqa: PLC0415 - `import tierfs` does not need it

        url = full_url(text)
        refuse(url, "torch", instead.format(url=url))


def _guard_serialization(module: Any) -> None:
    stock = module._is_path

    @functools.wraps(stock)
    def is_path(name_or_buffer: Any) -> Any:
        _check(name_or_buffer, _SAVE)
        return stock(name_or_buffer)

    module._is_path = is_path


def _guard_filesystem(module: Any) -> None:
    for kind, instead in ((module._FileSystemWriter, _WRITE), (module.FileSystemReader, _READ)):
        kind.__init__ = _checked_for_torchs_own(kind.__init__, instead)


def _checked_for_torchs_own(stock: Callable[..., None], instead: str) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if type(self).__module__ in _TORCHS_OWN:
            _check(path, instead)
        stock(self, path, *args, **kwargs)

    return __init__


def _guard_safetensors(module: Any) -> None:
    if module.__spec__._initializing and not hasattr(module, "serialize_file"):
        return  # `import safetensors.torch` imports torch, which imports tierfs, before it takes the changed function
    stock = module.serialize_file

    @functools.wraps(stock)
    def serialize_file(tensor_dict: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        _check(filename)
        return stock(tensor_dict, filename, *args, **kwargs)

    module.serialize_file = serialize_file


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.serialization": _guard_serialization,
    _FILESYSTEM: _guard_filesystem,
    **dict.fromkeys(("safetensors", "safetensors.numpy", "safetensors.torch"), _guard_safetensors),
}
_waiting: dict[str, Callable[[Any], None]] = {}
_done: set[str] = set()
