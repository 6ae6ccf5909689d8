"""Writes ``interface.txt``: every name that users may rely on, one a line, from the places that own them.

Run it after a change of the interface. `tests/test_interface.py` compares the file with the code. A line may be added at any
time. It may go, or change, only as ``stability.md`` says.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

from tierfs import errors
from tierfs.cli import main
from tierfs.cli.app import COMMANDS, ActionsParser, build_parser
from tierfs.cli.commands._status_prometheus import METRICS
from tierfs.dcp import TierWriter
from tierfs.mount.mounting import mount
from tierfs.session.settings import TierOptions

HERE = Path(__file__).parent
LIST = HERE / "interface.txt"
STABLE = ("tierfs", "tierfs.dcp", "tierfs.train", "tierfs.errors")
"""Packages whose ``__all__`` is stable."""
STABLE_PLUGS = {
    "tierfs.plugs.accelerate": ("attach",),
    "tierfs.plugs.huggingface": ("TierCallback", "attach", "from_pretrained", "save_pretrained"),
    "tierfs.plugs.lightning": ("TierCheckpoint", "TierCheckpointIO", "TierFSDPStrategy", "TierModelParallelStrategy"),
    "tierfs.plugs.ray": ("Notice", "run_url", "storage", "upload"),
    "tierfs.plugs.torchtitan": ("TierCheckpointManager",),
}
INTERNAL = {
    "TierWriter": {"facts", "gates", "running", "save_id"},
    "Context": {"lost_share"},
    "Replay": {"check", "lost_share", "reason_against", "recorder", "ring_bytes"},
    "ResumeReport": {"left_at"},
    "SaveHandle": {"begin", "end", "settle"},
    "TrainState": {"held", "learning_rates", "loaded", "to_load", "to_save", "values"},
    **{name: {"select"} for name in ("Best", "Every", "Geometric", "Latest", "Within")},
}
"""Members that other parts of tierfs call, and users do not."""
RESULTS = {"Context", "Restored", "ResumeReport", "SaveHandle"}
"""Classes that tierfs alone makes."""
EXPERIMENTAL = ("tierfs.device", "tierfs.experimental.activations", "tierfs.testing")
EXPERIMENTAL_PLUGS = {
    "tierfs.experimental.torchcheckpointing": ("TierStorageConfig",),
    "tierfs.plugs.deepspeed": ("load_checkpoint", "save_checkpoint"),
    "tierfs.plugs.epath": ("register",),
    "tierfs.plugs.mlflow": ("TierArtifactRepository",),
    "tierfs.plugs.verl": ("TierWeightsEngine",),
    "tierfs.plugs.wandb": ("register",),
}


def signature(of: Any) -> str:
    """Return the parameters of a callable with their defaults. Types are not in it: `tests/typing/` has them."""
    parameters = []
    for each in inspect.signature(of).parameters.values():
        text = str(each.replace(annotation=inspect.Parameter.empty))
        parameters.append(re.sub(r"<Signals\.(\w+): \d+>", r"\1", re.sub(r"<(?!Signals)[^<>]*>", "...", text)))
        parameters[-1:] = [] if each.name == "self" else parameters[-1:]
    kinds = [each.kind for each in inspect.signature(of).parameters.values() if each.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return f"({', '.join(parameters)})"


def is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "tierfs"


def members(kind: type) -> Iterator[str]:
    """Yield the public members of a class, but for those that a class of a framework has: the framework promises them."""
    theirs = {name for base in kind.__mro__ if not is_ours(base) for name in vars(base)}
    found = {name for base in kind.__mro__ if is_ours(base) for name in vars(base) if name[0] != "_"}
    for name in sorted(found - theirs - INTERNAL.get(kind.__name__, set())):
        item = inspect.getattr_static(kind, name)
        is_called = inspect.isroutine(item) or isinstance(item, (staticmethod, classmethod))
        value = f" = {item!r}" if isinstance(item, (str, int)) else ""
        yield f".{name}{signature(getattr(kind, name)) if is_called else value}"


def shown(item: Any) -> str:
    """Return what follows the name of a class or a function: the parameters, and the bases of an error."""
    if inspect.ismodule(item):  # it can be called
        item = mount
    if not callable(item):
        return ""
    if inspect.isclass(item) and issubclass(item, Exception):
        return f"{signature(item)}: {', '.join(base.__name__ for base in item.__mro__[1:-2])}"
    if inspect.isclass(item):
        made_by = next(base for base in item.__mro__ if "__init__" in vars(base) or "__new__" in vars(base))
        if item.__name__ in RESULTS or getattr(item, "_is_protocol", False):
            return ""
        return signature(item) if is_ours(made_by) else "(as its base)"
    return signature(item)


def parameters_of(module: str, name: str) -> str:
    """Return the parameters of a function or a class of a plug, whose framework need not be installed."""
    path = HERE.parents[1] / f"{module.replace('.', '/')}.py"
    body = ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
            return parameters_of(str(node.module), name)
    found = next(node for node in body if getattr(node, "name", "") == name)
    if isinstance(found, ast.ClassDef):
        own = [each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if not own:
            return "(as its base)"
        found = own[0]
        del found.args.args[0]
    for each in ast.walk(found.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return f"({ast.unparse(found.args)})"


def python() -> Iterator[str]:
    """Yield every stable name with its parameters and their defaults, and the members of classes."""
    yield from (
        f"{module}.{name}{parameters_of(module, name)}" for module, names in STABLE_PLUGS.items() for name in names
    )
    for module in STABLE:
        for name in importlib.import_module(module).__all__:
            item = getattr(importlib.import_module(module), name)
            yield f"{module}.{name}{shown(item)}"
            yield from (f"{module}.{name}{member}" for member in (members(item) if inspect.isclass(item) else ()))


def told(*words: str) -> str:
    """Return what a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        main(list(words))
    return printed.getvalue()


def exit_codes() -> Iterator[str]:
    """Yield each exit code with the kind of its errors."""
    kinds = {getattr(errors, name) for name in errors.__all__}
    yield from sorted({f"{kind.exit_code:3} {kind.kind}" for kind in kinds}, key=str)
    codes = " ".join(told("--help").partition("Exit codes:")[2].split()).rstrip(".")
    yield from (f"{code:>3} {text}" for code, text in re.findall(r"(\d+) ([^,]+)", codes))


def commands() -> Iterator[str]:
    """Yield each command and action with its arguments and options."""
    for name in COMMANDS:
        parser = build_parser(name)
        parsers = dict(parser.actions) if isinstance(parser, ActionsParser) else {"": parser}
        for action, each in parsers.items():
            for argument in each._actions[1:]:
                choices = f" {{{','.join(map(str, argument.choices))}}}" if argument.choices else ""
                word = ", ".join(argument.option_strings) or str(argument.metavar or argument.dest)
                yield f"{' '.join(filter(None, (name, action)))} {word}{choices}"


def settings() -> Iterator[str]:
    """Yield the keys of the configuration file, which are those of an entry for a store and of the local tiers."""
    yield from (f"stores.NAME.{key}" for key in ("url", "create", "options"))
    yield from (
        f"{table}.{item.name}" for table in ("stores.NAME", "tiers") for item in dataclasses.fields(TierOptions)
    )


def environment() -> Iterator[str]:
    """Yield the variables of the environment that the configuration's page names. `tests/test_docs.py` compares it with the code."""
    page = (HERE / "configuration.md").read_text().partition("## Environment")[2].partition("\n## ")[0]
    found = set(re.findall(r"`(TIERFS_\w+)`", page))
    yield from sorted(found | {f"TIERFS_{name.upper()}" for name in TierOptions.names()})


def metrics() -> Iterator[str]:
    """Yield each metric with its labels."""
    yield from (f"tierfs_{each.name}{{{','.join(labels)}}}" for labels, group in METRICS for each in group)


OPEN_MAPS = {"checkpoints", "fallbacks", "requests"}  # their names follow from what happened
OF_THIS_HOST = {"unused_folders"}
ASKED = """
init {base}/store
cp {base}/file {url}/file
cp {url}/file {url}/copy --dry-run
ls {url}
stat --chunks {url}/file
du {url}
verify {url}
wait {url}
probe {url}
gc {url}
scrub {url}
repair {url}
mv {url}/file {url}/moved
rm {url}/moved
checkpoint ls {url}/run
checkpoint show {url}/run/step_1
checkpoint verify {url}/run/step_1
checkpoint diff {url}/run/step_1 {url}/run/step_2
checkpoint export {url}/run/step_1 {base}/exported
checkpoint import {base}/exported {url}/imported
prune {url}/run --keep latest:1
materialize {url}/run {base}/copied
sync {base}/copied {url}/synced
flusher stop {url}
doctor
version
ls {url}/nothing
"""
"""Commands that print JSON, in an order in which each finds something."""


def keys(document: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value in a document, with ``*`` for the names of a map that has any."""
    if isinstance(document, dict):
        for name, value in document.items():
            shown_name = "*" if path.rpartition(".")[2] in OPEN_MAPS else name
            if name not in OF_THIS_HOST:
                yield from keys(value, f"{path}.{shown_name}" if path else shown_name)
    elif isinstance(document, list) and document and isinstance(document[0], dict):
        for value in document:
            yield from keys(value, f"{path}[]")
    else:
        yield path


def json_keys() -> Iterator[str]:
    """Yield the keys of each command's document, as the commands print them for a small store."""
    with tempfile.TemporaryDirectory(prefix="tierfs-interface-") as base:
        url = f"tierfs::file://{base}/store"
        Path(base, "file").write_bytes(bytes(range(256)) * 300)
        off = {"TIERFS_STATE_DIR": f"{base}/state", "TIERFS_RAM": "0", "TIERFS_NVME": "0"}
        with patch.dict(os.environ, off):
            for line in ASKED.strip().splitlines():
                if line.startswith("checkpoint ls"):
                    for step in (1, 2):
                        state = {"weight": torch.full((100,), float(step)), "step": step}
                        dcp.save(state, storage_writer=TierWriter(f"{url}/run/step_{step}"), no_dist=True)
                yield from found_keys(line, line.format(base=base, url=url))
        shutil.copytree(f"{base}/store", f"{base}/again")  # that this process has not opened without local tiers
        with patch.dict(os.environ, {**off, "TIERFS_STATE_DIR": f"{base}/tiers", "TIERFS_RAM": "64MiB"}):
            yield from found_keys("status {url}", f"status {base}/again")


def found_keys(line: str, words: str) -> Iterator[str]:
    """Yield the keys of the document of one command, each behind the command."""
    name = " ".join(word for word in line.split() if "{" not in word and word not in {"--chunks", "latest:1", "--keep"})
    name = "error" if "nothing" in line else name
    yield from (f"{name}: {key}" for key in sorted(set(keys(json.loads(told(*words.split(), "--json"))))))


PARTS = {
    "Python": python,
    "Exit codes": exit_codes,
    "Commands": commands,
    "Keys of --json": json_keys,
    "Keys of the configuration file": settings,
    "Environment": environment,
    "Metrics": metrics,
}


def text() -> str:
    """Return the whole list."""
    lines = (f"# {title}\n\n" + "".join(f"{line}\n" for line in part()) for title, part in PARTS.items())
    return "\n".join(lines)


def stability() -> list[str]:
    """Return the table of the public names for ``api.md``."""

    def cell(names: Sequence[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    packages = {name: importlib.import_module(name).__all__ for name in (*STABLE, *EXPERIMENTAL)}
    of = dict.fromkeys((*STABLE, *STABLE_PLUGS), "stable")
    listed = {**packages, **STABLE_PLUGS, **EXPERIMENTAL_PLUGS}
    rows = [f"| `{name}` | {of.get(name, 'experimental')} | {cell(listed[name])} |" for name in sorted(listed)]
    return ["| Module | Promise | Names |", "| --- | --- | --- |", *rows]


if __name__ == "__main__":
    LIST.write_text(text())
