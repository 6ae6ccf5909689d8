"""The settings of the local tiers, from argument, URL option, environment, configuration file or default.

The first of these that sets a value counts. A size is written as ``"8GiB"`` or as a share, ``"25%"``. For the ram tier,
that is a share of the memory that this process may use; for the nvme tier, of the disk's free space. ``"0"`` switches a
tier off.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.errors import InvalidInputError
from tierfs.host.filesystems import filesystem_of, is_durable
from tierfs.host.host import state_directory
from tierfs.host.nvme.head import BUDGET_BYTES_MIN, read_budget
from tierfs.host.pending.levels import Level
from tierfs.host.slab.memory import memory_limit
from tierfs.satellites import REPLICATION
from tierfs.store.encode.pipeline import AUTO, Codecs
from tierfs.units import bounded_timeout, format_bytes, parse_share, parse_size

if TYPE_CHECKING:
    from tierfs.flusher.engine import Replication

RAM_SHARE = "25%"
NVME_SHARE = "10%"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the system's
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The settings as they were written; ``None`` where there is none.

    Attributes:
        ack: The level at which ``close`` and every other change returns: ``staged``, ``local``, ``peer``
            or ``object``.
            Default: ``local``; ``object`` if the torch job spans hosts (``WORLD_SIZE`` is set and differs from
            ``LOCAL_WORLD_SIZE``, or from 1).
        ram: Budget of the ram tier: a size, or a share of the memory that this process may use. All processes and
            stores of the host share it. Default: ``25%``.
        nvme: Most room on the disk for the store's nvme tier: a size, or a share of the disk's free bytes at its start.
            Default: ``10%`` when the tier is made, then the same size; ``0`` if the object tier is a directory of this
            host.
        state_dir: The state directory, an absolute path or one that begins with ``~``. A relative path is refused:
            programs in two directories would be two hosts. Default: see ``TIERFS_STATE_DIR``.
        timeout: Seconds that a write waits for room, and a change for its level; ``inf`` for no limit. A wait for room
            that cannot come ends at once. Default: 600.
        bandwidth: Bytes per second from the flusher to the object tier, counted after encoding. Each host has one
            flusher per store, and the process that starts it decides. Writes that bypass the flusher, as with
            ``ack="object"``, are not limited. Default: no limit.
        codecs: How chunks are encoded: ``auto``, ``all``, ``off``, or names of codecs, ``zstd,plane``. A running
            flusher takes the codecs of the newest write that gives some. Default: ``auto``.
        device: Budget of GPU memory for the device tier of each ``TierWriter`` and GPU. Default: none.
        peers: On how many other hosts each change is held, 1 to 3: see docs/reference/peers.md. Default: 0.
        peer_listen: Where this host listens for them, ``ADDRESS[:PORT]``: the address of one interface.
        peer_domain: The failure domain of this host, for example its rack. Default: one of its own.
        peer_ram: Most memory for the changes of other hosts: a size, or a share as with ``ram``. Default: ``10%``.
        peer_nvme: Most room on the disk for them: a size, or a share as with ``nvme``. Default: ``10%``.
        peer_bandwidth: Bytes per second to other hosts. Default: no limit.
        peer_hosts: ``ADDRESS[:PORT],...`` of the other hosts. Default: they are found by listing the object tier.
        peer_share: 1 if all hosts together read each chunk of the object tier once. Default: 0.
    """

    ack: str | None = None
    ram: str | float | None = None
    nvme: str | float | None = None
    state_dir: str | None = None
    timeout: float | str | None = None
    bandwidth: str | float | None = None
    codecs: str | None = None
    device: str | float | None = None
    peers: str | float | None = None
    peer_listen: str | None = None
    peer_domain: str | None = None
    peer_ram: str | float | None = None
    peer_nvme: str | float | None = None
    peer_bandwidth: str | float | None = None
    peer_share: str | float | None = None
    peer_hosts: str | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the settings in arguments, URL options and the configuration file."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], where: str) -> TierOptions:
        """Read the settings from a mapping.

        Raises:
            InvalidInputError: The mapping has another key, or a value is of the wrong type.
        """
        known = {}
        for name, value in values.items():
            if name not in cls.names() or isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise InvalidInputError(f"{where}: {name} = {value!r} is not a setting of the local tiers")
            known[name] = value
        return cls(**known)  # type: ignore[arg-type]

    @property
    def is_explicit(self) -> bool:
        """Whether the user asked for local tiers, so that it is an error if they cannot be used."""
        asked = any(value is not None and value not in ("0", 0) for value in (self.ram, self.nvme))
        return asked or self.ack == Level.STAGED.label

    def over(self, other: TierOptions) -> TierOptions:
        """Return these settings, with the other's where these are ``None``."""
        return TierOptions(
            **{
                name: mine if (mine := getattr(self, name)) is not None else getattr(other, name)
                for name in self.names()
            }
        )


PEER_OPTIONS = tuple(name for name in TierOptions.names() if name.startswith("peer"))


@dataclass(frozen=True, slots=True)
class ResolvedTiers:
    """The options, resolved on this host.

    See `TierOptions`. A budget of 0 switches its tier off, ``timeout_s=None`` and ``bandwidth=0`` mean no limit, and
    ``problems`` tells by the tier's name why this host cannot provide it as asked for.
    """

    ack: Level
    ram_bytes: int
    nvme_bytes: int
    directory: Path
    timeout_s: float | None
    bandwidth: int = 0
    codecs: Codecs = AUTO
    device_bytes: int = 0
    replication: Replication | None = None
    problems: Mapping[str, str] = field(default_factory=dict)


def resolve(options: TierOptions, uuid: str, *, host_local: bool, process_local: bool) -> ResolvedTiers:
    """Fill in the defaults, and turn shares into sizes.

    Args:
        options: The settings from all sources, the earlier ones in the module's order over the later ones.
        uuid: The store's id.
        host_local: Whether the object tier is a directory of this host. Then there is no nvme tier by default.
        process_local: Whether the object tier belongs to this process alone. Then there are no local tiers by default.

    Raises:
        InvalidInputError: A value is invalid.
    """
    directory = state_directory(options.state_dir)
    ram = options.ram if options.ram is not None else "0" if process_local else RAM_SHARE
    nvme: str | float = "0" if host_local or process_local else read_budget(directory / "stores" / uuid) or NVME_SHARE
    if options.nvme is not None:
        nvme = options.nvme
    existing = next(each for each in (directory, *directory.parents) if os.path.exists(each))
    free_bytes = shutil.disk_usage(existing).free
    ram_bytes, nvme_bytes = size_of("ram", ram, memory_limit()), size_of("nvme", nvme, free_bytes)
    problems = {"ram": _ram_problem(options, ram_bytes)}
    nvme_bytes, problems["nvme"] = _nvme_on(options, directory, uuid, nvme_bytes, free_bytes)
    ack = Level.parse(options.ack) if options.ack else (Level.OBJECT if spans_hosts() else Level.LOCAL)
    replication: Replication | None = None
    if options.peers not in {None, 0, "0"}:
        replication = import_module(REPLICATION).replication_of(options, free_bytes)
    if replication is not None and not (ram_bytes or nvme_bytes):
        raise InvalidInputError("peers= needs a ram or nvme tier on this host, and both are switched off")
    if ack is Level.PEER and replication is None:
        raise InvalidInputError(
            "ack='peer' needs other hosts: set peers= and peer_listen= (TIERFS_PEERS, TIERFS_PEER_LISTEN)"
        )
    return ResolvedTiers(
        ack=ack,
        ram_bytes=ram_bytes,
        nvme_bytes=nvme_bytes,
        directory=directory,
        timeout_s=_timeout(options.timeout),
        bandwidth=size_of("bandwidth", 0 if options.bandwidth is None else options.bandwidth),
        codecs=Codecs.parse(options.codecs) if options.codecs is not None else AUTO,
        device_bytes=size_of("device", 0 if options.device is None else options.device),
        replication=replication,
        problems={tier: problem for tier, problem in problems.items() if problem},
    )


def size_of(name: str, given: float | str, whole: int | None = None) -> int:
    """Return the bytes of a setting, which may be a share of ``whole`` if there is one. Names it in an error."""
    try:
        return parse_size(given) if whole is None else parse_share(given, whole)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}: {error}") from None


def _timeout(given: float | str | None) -> float | None:
    """Return the number of seconds of the setting; ``None`` for no limit.

    Raises:
        InvalidInputError: The setting is not a number, or is negative.
    """
    try:
        seconds = TIMEOUT_S if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise InvalidInputError(f"timeout={given!r} is not a number of seconds from 0 on")
    return bounded_timeout(seconds)


def _nvme_on(options: TierOptions, directory: Path, uuid: str, budget_bytes: int, free_bytes: int) -> tuple[int, str]:
    """Return the budget of the nvme tier and a problem to report. The budget is 0 if the disk has no room for a tier.

    Raises:
        InvalidInputError: The user asked for a budget that is too small to hold anything.
    """
    where, free = f"the disk of {directory}", format_bytes(free_bytes)
    otherwise = (
        "so there is no nvme tier, and saves go from memory to the object tier: free some room, or set state_dir= "
        "(TIERFS_STATE_DIR) to another disk"
    )
    if 0 < budget_bytes < BUDGET_BYTES_MIN:
        if options.nvme is not None and not str(options.nvme).endswith("%"):
            raise InvalidInputError(
                f"nvme={options.nvme} is {budget_bytes} bytes, which is too small: give at least {BUDGET_BYTES_MIN}, "
                "or 0"
            )
        return 0, f"{where} has only {free} free, {otherwise}"
    if budget_bytes > free_bytes and read_budget(directory / "stores" / uuid) is None:
        return budget_bytes, (
            f"nvme={options.nvme} does not fit on {where}, where {free} are free, so the tier ends there: free some "
            "room, give less, or set state_dir= (TIERFS_STATE_DIR) to another disk"
        )
    if budget_bytes and options.nvme is not None and not is_durable(kind := filesystem_of(directory)):
        return budget_bytes, (
            f"nvme={options.nvme} is in {directory}, and a crash of the host may lose the data of a {kind} "
            "filesystem: nothing reaches `local` there, and a wait for `local` waits for the object tier: set "
            "state_dir= (TIERFS_STATE_DIR) to a disk"
        )
    return budget_bytes, ""


def _ram_problem(options: TierOptions, ram_bytes: int) -> str:
    """Return the problem of a budget that the user asked for; empty for none."""
    if options.ram is None:
        return ""
    memory, folder = memory_limit(), Path(os.environ.get("TIERFS_SHM_DIR") or SHARED_MEMORY)
    if ram_bytes > memory:
        return (
            f"ram={options.ram} is more than the {format_bytes(memory)} of memory that this process may use, and processes may be killed "
            "when it is used: give less"
        )
    folder_bytes = shutil.disk_usage(folder).total if folder.is_dir() else 0
    if ram_bytes > folder_bytes > 0:
        return (
            f"ram={options.ram} is more than the {format_bytes(folder_bytes)} of {folder}, and the rest goes to the "
            "state directory, where staging is slower: give less, or enlarge that folder (docker: --shm-size)"
        )
    return ""


def from_environment() -> TierOptions:
    """Return the settings from the environment: ``TIERFS_`` and a setting's name in capitals."""
    found = {name: os.environ.get(f"TIERFS_{name.upper()}") or None for name in TierOptions.names()}
    found["peer_domain"] = found["peer_domain"] or os.environ.get("TIERFS_DOMAIN") or None
    return TierOptions(**found)


def ranks_here() -> int:
    """Return how many processes share the ram tier, according to torchrun."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(said), 1) if said.isdigit() else 1


def spans_hosts() -> bool:
    """Return whether this process's torch job may run on several hosts, according to torchrun."""
    world, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    return world is not None and world != (here or "1")
