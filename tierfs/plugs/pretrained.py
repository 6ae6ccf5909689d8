"""Files for ``from_pretrained`` of transformers and peft: beside a checkpoint of `Trainer`, and at any URL."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers.utils import SAFE_WEIGHTS_NAME

from tierfs.checkpoint.export import safetensors_pieces
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.errors import InvalidInputError, NotFoundError

SECTIONS = re.compile(r"(optimizer|scheduler|scaler|extra|tierfs|hook_files|rank_\d+)(\.|$)")
"""The saved values that are no tensors of the model. Those keep the names that transformers gives them."""
_NO_MODEL = re.compile(r"/(rank-[^/]*\.safetensors|model\.safetensors\.index\.json|\.[^/]*)$")
"""The files of a checkpoint that are not copied for ``from_pretrained``."""


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


def names_in(model: Any) -> list[str]:
    """Return patterns of the names that a checkpoint has for the tensors of a model."""
    return [glob.escape(name) for name in saved_of(model, get_model_state_dict(model))]


def files_of(*parts: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:  # a tokenizer writes to a disk only
        for each in parts:
            if hasattr(each, "save_pretrained"):
                each.save_pretrained(folder)
        return {each.relative_to(folder).as_posix(): each.read_bytes() for each in _files_in(folder)}


def _files_in(folder: str) -> list[Path]:
    return [each for each in Path(folder).rglob("*") if each.is_file()]


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
