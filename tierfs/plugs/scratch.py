"""`Scratch`: a directory of this host for the hooks of Hugging Face. Its files are values of a checkpoint.

A subclass of `Trainer`, a callback or a hook of Accelerate keeps its own state as files in a local directory. All ranks
of a host share one. A value `SECTION`.NAME has the bytes of one file.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from tierfs.errors import FormatError, InvalidInputError, TierfsError
from tierfs.train.state import DictState, Wanted

SECTION = "hook_files"
MARK = ".tierfs-scratch"
"""Begins the name of the file that tells a directory made here from one that the user needs, or another training."""
_LENGTHS = "hook_files"
"""The fact of `About` with the length of each file in bytes."""


class Scratch:
    """One directory at a time for hooks, to save or to load. Its methods are collectives, unless they say otherwise.

    Attributes:
        path: The directory on this host; empty if there is none.
    """

    def __init__(self) -> None:
        self._ranks = PartialState()
        self.path = self._root = self._mark = ""
        self._hosts = 1
        self._values: dict[str, torch.Tensor] = {}
        self._lengths: dict[str, int] = {}

    def make(self, directory: str = "", name: str = "") -> None:
        """Make an empty directory of this name in a directory; in a temporary one by default.

        Raises:
            InvalidInputError: It is there already.
            TierfsError: A host cannot make it.
        """
        place, problem = "", ""
        self._mark = self._mark or f"{MARK}-{self._gathered(secrets.token_hex(8))[0]}"
        if self._ranks.is_local_main_process:
            try:
                place = os.path.join(directory or tempfile.mkdtemp(prefix="tierfs-hooks-"), name)
                os.makedirs(place, exist_ok=True)
                if os.listdir(place) not in ([], [self._mark]):  # another host may share it
                    problem = f"{place} is there, but hooks need it: move it away, or take another output_dir"
                else:
                    Path(place, self._mark).touch()
            except OSError as error:
                problem = f"a directory for hooks cannot be made: {error}"
        told = self._gathered((place, problem))
        if problems := [each for _, each in told if each]:
            raise InvalidInputError(problems[0])
        self._hosts = sum(1 for place, _ in told if place)
        self.path, _ = told[self._ranks.process_index - self._ranks.local_process_index]
        self._root = self.path if directory else self.path.removesuffix(name).rstrip("/")

    def run(self, hooks: Callable[[], object]) -> None:
        """Call hooks on all ranks. If they fail on one rank, that rank raises their error, and the others `TierfsError`."""
        failure: Exception | None = None
        try:
            hooks()
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
            failure = error
        problems = self._gathered("" if failure is None else repr(failure))
        if failure is not None:
            raise failure
        if text := next(filter(None, problems), ""):
            raise TierfsError(f"hooks failed on another rank: {text}")

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the framework's own, which is in the checkpoint elsewhere. Not a collective."""
        if self._ranks.is_local_main_process:
            Path(self.path, name).write_bytes(data)

    def take(self, *, leave_out: Collection[str] = ()) -> None:
        """Read the files of the directory, but some names. Each is saved once, by the first rank that sees it.

        Raises:
            InvalidInputError: Hosts wrote different files of one name, something is no regular file, or another
                training used the directory.
        """
        found: dict[str, tuple[int, str]] = {}
        problem = ""
        if self._ranks.is_local_main_process:
            try:
                found = self._files({self._mark, *leave_out})
                if [each for each in os.listdir(self.path) if each.startswith(MARK)] != [self._mark]:
                    problem = f"{self.path} was used by another training, too: take another output_dir"
            except (OSError, InvalidInputError) as error:
                problem = str(error)
        told = self._gathered((found, problem))
        if problems := [each for _, each in told if each]:
            raise InvalidInputError(problems[0])
        owners: dict[str, int] = {}
        for rank, (files, _) in enumerate(told):
            for name, content in files.items():
                first = owners.setdefault(name, rank)
                if told[first][0][name] != content:
                    raise InvalidInputError(
                        f"ranks {first} and {rank} wrote different files {name!r}: name them by rank"
                    )
        self._lengths = {name: told[rank][0][name][0] for name, rank in owners.items()}
        mine = [name for name, rank in owners.items() if rank == self._ranks.process_index]
        self._values = {name: _bytes_of(Path(self.path, name)) for name in mine}

    def remove(self, *, waits: bool = True) -> None:
        """Remove the directory, once all ranks call this. ``waits=False`` is for a rank that fails alone."""
        root, self.path, self._root, self._values, self._lengths = self._root, "", "", {}, {}
        if waits:
            self._gathered("")
        if root and self._ranks.is_local_main_process:
            shutil.rmtree(root, ignore_errors=True)  # on a shared disk, another host may do the same

    def values(self) -> dict[str, Any]:
        """Return the content of the files that this rank saves or loads. Not a collective."""
        return {SECTION: dict(self._values)} if self._values else {}

    def facts(self) -> dict[str, Any]:
        """Return what `to_load` needs of `About`. Not a collective."""
        return {_LENGTHS: self._lengths} if self._lengths else {}

    def to_load(self, wanted: Wanted) -> dict[str, Any]:
        """Make the files of a checkpoint. One rank of a host returns their content to load into. Not a collective.

        Without a directory, there is no place for them.
        """
        if not self._root:
            return {}
        self._values, self._lengths = {}, dict((wanted.about.state if wanted.about else {}).get(_LENGTHS, {}))
        if wanted.about is not None:
            self.path = os.path.join(self._root, f"checkpoint-{wanted.about.step}")
        for name in self._lengths:  # on all ranks, which would wait for each other
            if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name:
                raise FormatError(f"the checkpoint has a file {name!r} of a hook, which leaves its directory")
        if not self._ranks.is_local_main_process:
            return {}
        os.makedirs(self.path, exist_ok=True)
        for name, length in self._lengths.items():
            path = Path(self.path, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._values[name] = (
                torch.from_file(str(path), shared=True, size=length, dtype=torch.uint8)
                if length
                else torch.empty(0, dtype=torch.uint8)
            )
        return self.values()

    @property
    def has_files(self) -> bool:
        """Whether hooks wrote files, or the checkpoint has some. Not a collective."""
        return bool(self._lengths)

    def _files(self, leave_out: Collection[str]) -> dict[str, tuple[int, str]]:
        """Return the length of each file, and its digest if another host may have a file of this name."""
        found = {}
        for path in sorted(Path(self.path).rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and name not in leave_out:
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if self._hosts > 1 else ""
                found[name] = path.stat().st_size, digest
            elif not path.is_file() and (path.is_symlink() or not path.is_dir()):
                raise InvalidInputError(f"{path} is neither a file nor a directory: hooks may write only these")
        return found

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = gather_object([value])
        return found


class WithFiles:
    """Adds the files of a scratch directory to a `TrainState` or a `DictState`."""

    scratch: Scratch

    def to_save(self, step: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        values, said = super().to_save(step, kind)  # type: ignore[misc]  # of the class beside this one
        return values, {**said, **self.scratch.facts()}

    def values(self, kind: str) -> dict[str, Any]:
        values: dict[str, Any] = super().values(kind)  # type: ignore[misc]  # as above
        return {**values, **self.scratch.values()}

    def to_load(self, wanted: Wanted) -> dict[str, Any]:
        values: dict[str, Any] = super().to_load(wanted)  # type: ignore[misc]  # as above
        return {**values, **self.scratch.to_load(wanted)}

    def loaded(self, values: Mapping[str, Any], wanted: Wanted) -> list[str]:
        rest = {name: value for name, value in values.items() if name != SECTION}
        notes: list[str] = super().loaded(rest, wanted)  # type: ignore[misc]  # as above
        return notes


class FilesAlone(WithFiles, DictState):
    """The files of hooks without the rest of a state, and extra values that each checkpoint has."""

    def __init__(self, scratch: Scratch, **extra: Any) -> None:
        super().__init__({"extra": extra})
        self.scratch = scratch


def is_foreign(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory has files, and no `Scratch` made it."""
    names = os.listdir(directory)
    return bool(names) and not any(each.startswith(MARK) for each in names)


def _bytes_of(path: Path) -> torch.Tensor:
    """Read a file. A mapping of it could end the process, if a hook's thread cuts the file meanwhile."""
    data = bytearray(path.read_bytes())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
