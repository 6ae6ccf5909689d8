"""``tierfs doctor``: check this machine, and say what to change.

Checks of the machine do not use the network, and leave nothing changed: `check_fuse` mounts and unmounts. `check_endpoint` writes test objects to an endpoint, and
notes a changed result in the descriptor of the store there.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from tierfs import __version__, kernels
from tierfs.cli.arguments import command
from tierfs.cli.commands.about import installed_version
from tierfs.cli.terminal.output import align, describe, print_result, printable
from tierfs.errors import InvalidInputError, TierfsError, without_passwords
from tierfs.host.filesystems import filesystem_of, is_durable, is_network, make_private
from tierfs.host.host import state_directory
from tierfs.host.slab.memory import memory_limit
from tierfs.mount.attachment import DEVICE, try_mount
from tierfs.session import open_store, parse_url
from tierfs.session.descriptor import probe_store
from tierfs.session.settings import RAM_SHARE, SHARED_MEMORY, TierOptions, from_environment, resolve
from tierfs.session.url import configured_tiers
from tierfs.units import format_bytes, parse_share

PROBLEM_EXIT_CODE = 1
SHM_BYTES_MIN = 1 << 30  # less holds about ten segments, and no checkpoint that is worth a ram tier
DISK_BYTES_MIN = 10 << 30
DESCRIPTORS_MIN = 4096  # a process needs one for each segment of the host; a flusher also needs one for each client


@command(
    "doctor",
    "check this machine, and the endpoint of URL if it is given, and advise what to change",
    """
    tierfs doctor
    tierfs doctor s3://bucket/run
    tierfs doctor --json
    """,
    {
        "url URL?": "also test this endpoint, as `tierfs probe` does, and connect to the other hosts of its store, if this one has peers"
    },
)
def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print their results. Return 1 if one of them is a problem."""
    checks = list(check_machine())
    if arguments.url:
        checks += [check_endpoint(arguments.url), *check_peers(arguments.url)]
    code = PROBLEM_EXIT_CODE if any(check.state == "problem" for check in checks) else 0
    lines = align([(check.state, check.name, printable(check.found)) for check in checks], states=(0,))
    shown = [
        f"{line}\n      -> {printable(check.advice)}" if check.advice else line
        for line, check in zip(lines, checks, strict=True)
    ]
    document = {"ok": not code, "checks": [check._asdict() for check in checks]}
    return print_result(arguments, document, *shown, code=code)


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        name: Name of the checked thing.
        state: ``ok``; ``note``: something is slower or missing; ``problem``: tierfs cannot do its job.
        found: The state of the thing, in words.
        advice: What to change; empty if nothing.
    """

    name: str
    state: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""


class Cloud(NamedTuple):
    """The places where a cloud's client looks for credentials, apart from the machine's own role.

    Attributes:
        package: The client's package.
        extra: The extra of tierfs that installs the client.
        variables: Environment variables.
        files: Paths below the home directory.
    """

    package: str
    extra: str
    variables: tuple[str, ...]
    files: tuple[str, ...]


CLOUDS = {
    "S3": Cloud(
        "s3fs",
        "s3",
        ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        (".aws/credentials", ".aws/config"),
    ),
    "Google Cloud Storage": Cloud(
        "gcsfs", "gcs", ("GOOGLE_APPLICATION_CREDENTIALS",), (".config/gcloud/application_default_credentials.json",)
    ),
    "Azure Blob Storage": Cloud(
        "adlfs",
        "azure",
        ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_CLIENT_ID"),
        (".azure/msal_token_cache.json",),
    ),
}


def check_machine() -> Iterator[Check]:
    """Run every check but `check_endpoint`, in the order in which a person reads the results."""
    yield _versions()
    yield check_configuration()
    settings = _settings()
    folder = Path(os.environ.get("TIERFS_SHM_DIR") or SHARED_MEMORY)
    yield check_shared_memory(folder, memory_limit(), RAM_SHARE if settings.ram is None else settings.ram)
    yield check_huge_pages(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"), platform.release())
    yield check_state_directory(settings.state_dir)
    yield check_descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_kernels(kernels.status())
    yield check_fuse()
    yield _gpu()
    for name, cloud in CLOUDS.items():
        yield check_cloud(
            name, cloud, os.environ, Path(os.path.expanduser("~")), has_client=_is_installed(cloud.package)
        )


def check_configuration() -> Check:
    """Check that the configuration file can be read, and the settings of the local tiers in it and the environment."""
    path = os.environ.get("TIERFS_CONFIG") or "~/.config/tierfs/config.toml"
    try:
        resolve(from_environment().over(configured_tiers()), "0" * 32, host_local=False, process_local=False)
    except InvalidInputError as error:
        return Check("configuration", "problem", str(error), "correct the setting: docs/reference/configuration.md")
    there = os.path.exists(os.path.expanduser(path))
    return Check("configuration", "ok", path if there else f"no {path}: the defaults apply")


def _settings() -> TierOptions:
    """Return the settings of the local tiers, without those of an invalid configuration file."""
    try:
        return from_environment().over(configured_tiers())
    except InvalidInputError:
        return from_environment()


def check_shared_memory(folder: Path, memory_bytes: int, ram: str | float = RAM_SHARE) -> Check:
    """Check that the ram tier fits into shared memory."""
    if not folder.is_absolute():
        advice = "set TIERFS_SHM_DIR to an absolute path: there are no local tiers"
        return Check("shared memory", "problem", f"{folder} is a relative path", advice)
    try:
        budget = parse_share(ram, memory_bytes)
    except InvalidInputError as error:
        return Check("shared memory", "problem", str(error), "correct ram= (TIERFS_RAM)")
    enlarge = "give the container more shared memory (docker: --shm-size=64g), or name another tmpfs in TIERFS_SHM_DIR"
    if not folder.is_dir():
        return Check("shared memory", "note", f"{folder} does not exist: segments go to the disk", enlarge)
    if not os.access(folder, os.W_OK | os.X_OK):
        advice = f"let this user write there, or {enlarge}"
        return Check("shared memory", "note", f"{folder} is not writable: segments go to the disk", advice)
    usage, kind = shutil.disk_usage(folder), filesystem_of(folder)
    found = f"{folder}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free, {kind}"
    if kind not in {"tmpfs", "ramfs", "unknown"}:
        return Check("shared memory", "note", found, f"{kind} is not a memory filesystem: {enlarge}")
    if usage.total < max(min(budget, memory_bytes), SHM_BYTES_MIN):
        wanted = f"the ram budget of {format_bytes(budget)} does not fit; the rest goes to the disk, which is slower: {enlarge}"
        return Check("shared memory", "note", found, wanted)
    return Check("shared memory", "ok", f"{found}; ram budget {format_bytes(budget)}")


def check_huge_pages(setting: Path, release: str) -> Check:
    """Check that segments can use huge pages, which make a process's first save faster."""
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    try:
        denied = "[deny]" in setting.read_text()
    except OSError:
        denied = True
    if version < (6, 1):
        return Check("huge pages", "note", f"Linux {release}", "Linux 6.1 or newer makes first saves faster")
    if denied:
        advice = f"set {setting} to anything but deny: first saves get faster"
        return Check("huge pages", "note", "disabled for shared memory", advice)
    return Check("huge pages", "ok", "enabled for shared memory")


def check_state_directory(given: str | None) -> Check:
    """Check that the nvme tier is on a durable local disk with enough room."""
    elsewhere = "set TIERFS_STATE_DIR to a directory on a local disk"
    try:
        directory = state_directory(given)
    except InvalidInputError as error:
        return Check("state directory", "problem", str(error), elsewhere)
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if existing == directory:
        try:
            make_private(directory)  # it is there, so this only checks it
        except TierfsError as error:
            return Check("state directory", "problem", str(error), f"correct that, or {elsewhere}")
    kind, usage = filesystem_of(directory), shutil.disk_usage(existing)
    found = f"{directory}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free, {kind}"
    if not os.access(existing, os.W_OK):
        return Check("state directory", "problem", f"{found}, not writable", elsewhere)
    if is_network(kind):
        return Check("state directory", "problem", found, f"locks on {kind} do not work between hosts: {elsewhere}")
    if not is_durable(kind):
        return Check("state directory", "note", found, f"{kind} does not survive a crash of the host: {elsewhere}")
    if usage.free < DISK_BYTES_MIN:
        return Check("state directory", "note", found, f"little room for the nvme tier: free some room, or {elsewhere}")
    return Check("state directory", "ok", found)


def check_descriptors(soft: int, hard: int) -> Check:
    """Check that a process may open enough files."""
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_MIN:
        return Check("open files", "note", f"limit {soft}, hard limit {hard}", "run `ulimit -n 65536` before the job")
    return Check("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}")


def check_kernels(status: str) -> Check:
    """Check that the compiled kernels are used. Without them, copies and codecs take several passes over memory."""
    if status == "compiled":
        return Check("kernels", "ok", status)
    return Check("kernels", "note", status, "install a C compiler, then reinstall tierfs: saves and codecs get faster")


def check_fuse() -> Check:
    """Check that `tierfs mount` works, by a mount on a temporary directory."""
    try:
        how = try_mount()
    except (TierfsError, OSError) as error:
        advice = (
            f"in a container: docker run --device {DEVICE} --cap-add SYS_ADMIN; else use materialize, sync or the URL"
        )
        return Check("mount", "note", describe(error).message, advice)
    return Check("mount", "ok", f"{DEVICE}, {how}")


def check_cloud(name: str, cloud: Cloud, environment: Mapping[str, str], home: Path, *, has_client: bool) -> Check:
    """Check that a cloud's client is installed, and where it finds credentials. Never show their values."""
    found = [variable for variable in cloud.variables if environment.get(variable)]
    found += [f"~/{file}" for file in cloud.files if os.path.exists(home / file)]
    if not has_client:
        advice = f"pip install 'tierfs[{cloud.extra}]'" if found else ""
        return Check(name, "note" if found else "ok", f"{cloud.package} is not installed", advice)
    if found:
        return Check(name, "ok", f"{cloud.package}; credentials: {', '.join(found)}")
    advice = f"set {cloud.variables[0]}, unless this machine has a role or the store's options hold credentials"
    return Check(name, "note", f"{cloud.package}; no credentials found", advice)


def check_endpoint(url: str) -> Check:
    """Test which promises the endpoint at a URL keeps: see ``tierfs probe``."""
    try:
        endpoint = probe_store(parse_url(url))[1].capabilities
    except (TierfsError, OSError) as error:
        return Check("endpoint", "problem", describe(error).message)
    url = without_passwords(url)
    if endpoint.single_writer:
        missing = ", ".join(endpoint.missing)
        return Check("endpoint", "note", f"{url} does not support: {missing}", "let one process at a time write to it")
    return Check("endpoint", "ok", f"{url}: any number of writers")


def check_peers(url: str) -> Iterator[Check]:
    """Connect to each other host that holds changes of the store at a URL, if this host has peers."""
    if not _settings().peers:
        return
    try:
        store, _ = open_store(parse_url(url))
        found = store.tiers.remote.problems() if store.tiers is not None and store.tiers.remote is not None else {}
    except (TierfsError, OSError) as error:
        yield Check("peers", "problem", describe(error).message)
        return
    if not found:
        yield Check(
            "peers", "note", "no other host of this store is there", "start a flusher with peers on other hosts"
        )
    for host, problem in found.items():
        advice = (
            "let both hosts connect to each other's peer_listen: firewall, network policy, address" if problem else ""
        )
        yield Check("peer", "problem" if problem else "ok", f"{host}{problem and ': '}{problem}", advice)


def _versions() -> Check:
    versions = {"tierfs": __version__, "Python": platform.python_version(), "Linux": platform.release()}
    versions |= {package: installed_version(package) or "-" for package in ("fsspec", "torch", "numpy")}
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if sys.platform != "linux":
        return Check("versions", "problem", found, "run tierfs on Linux")
    if versions["torch"] == "-":
        return Check("versions", "note", found, "pip install 'tierfs[torch]' for TierWriter and `tierfs checkpoint`")
    return Check("versions", "ok", found)


def _gpu() -> Check:
    devices = glob.glob("/dev/nvidia[0-9]*")
    if not devices:
        return Check("GPU", "ok", "none")
    found = f"{len(devices)} from NVIDIA"
    if not _is_installed("cupy"):
        advice = "pip install 'tierfs[gpu]': snapshots in GPU memory take one kernel launch"
        return Check("GPU", "note", f"{found}; CuPy is not installed", advice)
    return Check("GPU", "ok", f"{found}, CuPy")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
