"""Make torch's code for local paths refuse a tierfs URL.

torch would take the URL for a directory in the working directory:
``FileSystemWriter("tierfs::file:///data/run")`` creates ``./tierfs::file:/data/run`` and reports success.
`guard` changes these places inside torch. Each change affects only paths that begin with ``tierfs:``; for all
others it calls the original:

- ``torch.serialization._is_path``, which ``torch.save`` and ``torch.load`` call first.
- ``torch.distributed.checkpoint.filesystem``: the constructors of ``FileSystemWriter`` and
  ``FileSystemReader`` (and of torch's Hugging Face classes, which derive from them), and the methods of
  ``FileSystem`` that take a path. ``FsspecWriter`` and ``FsspecReader`` derive from the two classes as well
  and are not changed. Neither are classes from outside of torch until they use ``FileSystem``.
- ``_consolidate_safetensors_files``, and the ``CheckpointWriter`` of ``_experimental``.

``import tierfs`` changes the modules of torch that are loaded. A module that is loaded later is changed at
the end of its import. This module imports nothing of torch itself.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

_CHECKPOINT = "torch.distributed.checkpoint"
_FILESYSTEM = f"{_CHECKPOINT}.filesystem"
_TORCHS_OWN = {_FILESYSTEM, f"{_CHECKPOINT}.hf_storage", f"{_CHECKPOINT}.quantized_hf_storage"}
_SCHEME = "tierfs:"
_WRITE = "dcp.save(state, storage_writer=tierfs.dcp.TierWriter({url!r}))"
_READ = "dcp.load(state, storage_reader=tierfs.dcp.TierReader({url!r}))"
_COPY = "a copy in a local directory (`tierfs cp -r`)"
_SAVE = "`with fsspec.open({url!r}, 'wb') as file: torch.save(value, file)`, or torch.load(file) with 'rb'"


def guard() -> None:
    """Make torch's code for local paths refuse tierfs's URLs. Idempotent."""
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
            "%s of this torch is unknown (%s): it may take a tierfs URL for a local path, so pass it none",
            name,
            error,
        )


def _check(path: Any, who: str, instead: str) -> None:
    """Refuse a path that is a tierfs URL.

    Raises:
        InvalidInputError: The path is one.
    """
    if not isinstance(path, (str, os.PathLike)):
        return
    text = os.fspath(path)
    if not isinstance(text, str) or _SCHEME not in text:
        return
    if os.path.isabs(text):
        text = text.removeprefix(os.getcwd()).lstrip(os.sep)  # Path(url).absolute() prepends the working directory
    if not text.startswith(_SCHEME):
        return
    from tierfs.dcp.address import full_url  # noqa: PLC0415 - `import tierfs` does not need them
    from tierfs.errors import InvalidInputError  # noqa: PLC0415

    url = full_url(text)
    raise InvalidInputError(
        f"{who}: only local paths are supported, and the tierfs URL {url} would become a directory of that name: use "
        f"{instead.format(url=url)}"
    )


def _checked(stock: Callable[..., Any], who: str, instead: str, *names: str) -> Callable[..., Any]:
    """Return a function that first checks some of its arguments; by default those whose name ends in ``path``."""
    import inspect  # noqa: PLC0415 - torch has loaded it; `import tierfs` alone does not need it

    signature = inspect.signature(stock)
    looked_at = names or [name for name in signature.parameters if name.endswith("path")]

    @functools.wraps(stock)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            given = {}  # `stock` reports the error
        for name in looked_at:
            _check(given.get(name), who, instead)
        return stock(*args, **kwargs)

    return checked


def _guard_serialization(module: Any) -> None:
    stock = module._is_path

    @functools.wraps(stock)
    def is_path(name_or_buffer: Any) -> Any:
        _check(name_or_buffer, "torch.save and torch.load", _SAVE)
        return stock(name_or_buffer)

    module._is_path = is_path


def _guard_filesystem(module: Any) -> None:
    for kind, instead in ((module._FileSystemWriter, _WRITE), (module.FileSystemReader, _READ)):
        kind.__init__ = _checked_for_torchs_own(kind.__init__, instead)
    for name in ("create_stream", "rename", "mkdir", "exists", "rm_file", "ls"):
        stock = getattr(module.FileSystem, name)
        setattr(
            module.FileSystem,
            name,
            _checked(stock, "torch's FileSystemWriter or FileSystemReader", f"{_WRITE} or {_READ}"),
        )


def _checked_for_torchs_own(stock: Callable[..., None], instead: str) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if type(self).__module__ in _TORCHS_OWN:
            _check(path, f"torch's {type(self).__name__}", instead)
        stock(self, path, *args, **kwargs)

    return __init__


def _guard_consolidation(module: Any) -> None:
    stock = module._consolidate_safetensors_files
    module._consolidate_safetensors_files = _checked(
        stock, "consolidate_safetensors_files", _COPY, "input_dir", "output_dir"
    )


def _guard_experimental(module: Any) -> None:
    kind = module.CheckpointWriter
    kind.write = _checked(kind.write, f"torch's {kind.__name__}", _WRITE, "path")


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.serialization": _guard_serialization,
    _FILESYSTEM: _guard_filesystem,
    f"{_CHECKPOINT}._consolidate_hf_safetensors": _guard_consolidation,
    f"{_CHECKPOINT}._experimental.checkpoint_writer": _guard_experimental,
}
_waiting: dict[str, Callable[[Any], None]] = {}
_done: set[str] = set()
