"""Refuse a tierfs URL where a local path is expected, and find folders that code made of one: ``./tierfs::file:``.

``os.makedirs(url)`` and ``pathlib.Path(url).mkdir()`` would succeed, and files saved there would be in no store. So an
audit hook of Python raises before a call takes such a path, and no folder is made. Native code raises no audit event:
``torch.save`` and safetensors fail by themselves, because no such folder exists. ``tierfs status`` lists the folders
that other code made.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from types import FrameType
from typing import Any

ENTRIES_MAX = 100_000
_PREFIX = "tierfs:"
# A URL at the beginning of a path, or behind a directory: `os.path.abspath(url)`, `os.path.join(directory, url)`.
_URL = re.compile(r"(?:\A|/)((?:fsspec\+)?tierfs:(?::[a-z0-9+._-]*:?)?(?:/.*)?)\Z", re.IGNORECASE | re.DOTALL)
_EVENTS = frozenset({"open", "os.mkdir", "os.listdir", "os.scandir"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_COPY = "tierfs.plugs.huggingface: TierCallback, attach, save_pretrained, from_pretrained; or a local directory, then `fs, path = fsspec.url_to_fs(URL)` and fs.put(directory, path, recursive=True)"
_LIGHTNING = "tierfs.plugs.lightning: callbacks=[TierCheckpoint(URL)], and its strategy for sharded models"
_DCP = "torch.distributed.checkpoint"
_EXPORT = "tierfs.dcp.TierWriter(URL) and TierReader(URL); `tierfs checkpoint export URL TARGET` writes safetensors and torch.save files, and `tierfs checkpoint import SOURCE URL` reads them"
# What to use instead, by the package that was called. Its innermost part that is named here counts.
_WAYS = {
    "torch": "`with fsspec.open(URL, 'wb') as file: torch.save(value, file)`, or torch.load(file) with 'rb'",
    _DCP: "dcp.save(state, storage_writer=tierfs.dcp.TierWriter(URL)), dcp.load(state, storage_reader=tierfs.dcp.TierReader(URL))",
    f"{_DCP}._consolidate_hf_safetensors": "a copy in a local directory (`tierfs cp -r`)",
    **dict.fromkeys((f"{_DCP}.format_utils", f"{_DCP}.hf_storage"), _EXPORT),
    "safetensors": "`with fsspec.open(URL, 'wb') as file: file.write(safetensors.torch.save(tensors))`, or a mount",
    "tensorboardX": "torch.utils.tensorboard.SummaryWriter(URL), with the package tensorboard installed",
    "wandb": "a local directory for wandb.init(dir=...) and WANDB_DIR: wandb itself sends its files from there",
    **dict.fromkeys(("lightning", "lightning_fabric", "pytorch_lightning"), _LIGHTNING),
    **dict.fromkeys(("accelerate", "diffusers", "huggingface_hub", "peft", "transformers", "trl"), _COPY),
}


def misplaced(directory: str | None = None) -> list[str]:
    """Return the paths of such folders in a directory, by default the working directory; none if it is unreadable."""
    try:
        where = os.getcwd() if directory is None else directory
        with os.scandir(where) as entries:
            looked_at = itertools.islice(entries, ENTRIES_MAX)
            return sorted(entry.path for entry in looked_at if entry.name.removeprefix("fsspec+").startswith(_PREFIX))
    except OSError:  # the directory was removed or is unreadable
        return []


def refuse_urls_as_paths() -> None:
    """Refuse tierfs URLs as local paths from now on, in this process and those that it forks."""
    sys.addaudithook(_audit)


def _url_in(path: str) -> str | None:
    """Return the tierfs URL that a local path is made of, as the path has it; ``None`` for other paths."""
    found = _URL.search(path) if _PREFIX in path else None
    return None if found is None else found[1]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # Python sets a module's names to None at its end, and objects that are freed then may still open files.
    if not _EVENTS or event not in _EVENTS or not isinstance(args[0], str) or (url := _url_in(args[0])) is None:
        return
    # The files of a folder from before can be read, moved and deleted. `shutil.rmtree` calls `os.open` with names that
    # are relative to a descriptor; that event has no mode.
    is_read_only = event != "os.mkdir" and not (event == "open" and args[2] & _WRITES)
    if is_read_only and ((event == "open" and args[1] is None) or os.path.lexists(args[0])):
        return
    from tierfs.errors import InvalidInputError  # noqa: PLC0415 - `import tierfs` may find a broken path

    caller = _caller(sys._getframe(1))
    raise InvalidInputError(
        f"{caller or event}: only local paths are supported here, and {url!r} is a tierfs URL: use "
        f"{_WAYS.get(caller, f'fsspec.open(URL, mode), or {_COPY}')}"
    )


def _caller(frame: FrameType | None) -> str:
    """Return the framework that a program called, as `_WAYS` names it; an empty text if it called Python itself.

    A framework may call another one: accelerate calls safetensors. The outermost one counts, and of it its innermost
    part. The class of an object counts, too: torch calls `HuggingFaceStorageWriter` by methods of its base class.
    """
    found = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for each in (type(frame.f_locals.get("self")).__module__, module):
            name = each
            while name and name not in _WAYS:
                name = name.rpartition(".")[0]
            if name and not found.startswith(f"{name}."):
                found = name
        if not name and module.partition(".")[0] not in {"tierfs", *sys.stdlib_module_names}:
            break
        frame = frame.f_back
    return found
