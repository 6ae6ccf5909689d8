"""The process that serves a mount, from the start until ``umount`` or a signal ends it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tierfs import store as verbs
from tierfs.errors import InvalidInputError, NotFoundError, TierfsError
from tierfs.host.filesystems import make_private
from tierfs.host.host import state_directory
from tierfs.host.pending.levels import Level
from tierfs.mount import attachment
from tierfs.mount.nodes import Node
from tierfs.mount.requests import Requests
from tierfs.mount.server import SLOW_TIMEOUT_S, TIMEOUT_S, Server
from tierfs.mount.state import MountState
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.session.url import asks_to_create
from tierfs.store.write.staging import expect_changes

FLUSH_S = 45.0
"""Seconds that ending a mount may take. Slurm and Kubernetes usually wait longer between SIGTERM and SIGKILL."""
READY_S = 30.0
# The kernel tells of a file's release after its close has returned.
RELEASE_S = 2.0
RELEASE_POLL_S = 0.01
_logger = logging.getLogger("tierfs.mount")


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of a mount.

    Attributes:
        read_only: Whether every change is refused.
        allow_other: Whether other users of the host may use the mount, as far as the files' modes allow.
        ack: The level that ``close`` and ``fsync`` of a file wait for. By default the level of the store.
        timeout_s: Seconds without an answer after which a program gets EIO. Storing a whole file may take 600 s, or ten
            times ``timeout_s`` if that is below 30 or above 60.
        tiers: Settings of the local tiers: ``ram``, ``nvme``, ``state_dir``, ``timeout``, ``bandwidth``,
            ``codecs``.
        options: Options of the object tier's filesystem.
    """

    read_only: bool = False
    allow_other: bool = False
    ack: str | None = None
    timeout_s: float = TIMEOUT_S
    tiers: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the options as one line, for the process that serves the mount."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MountOptions:
        """Parse the line that `to_json` made."""
        return cls(**json.loads(text))


def serve(url: str, directory: Path, options: MountOptions, ready: Callable[[], object] = lambda: None) -> list[str]:
    """Mount a store, and serve it until a user unmounts it or this process gets SIGTERM, SIGINT or SIGHUP.

    A SIGHUP that is ignored, as after ``nohup``, stays ignored.

    Args:
        url: A directory in a store, or a store's root.
        directory: The directory of this host to mount on.
        options: The options of the mount.
        ready: Called once programs can use the mount.

    Returns:
        One line for each file that is not published or has not reached its level, with the reason. Empty on success.

    Raises:
        TierfsError: The store could not be mounted.
    """
    state = _open(url, options)
    refuse_own_places(state, directory)
    device = attachment.attach(
        f"tierfs::{state.store.url}", directory, read_only=options.read_only, allow_other=options.allow_other
    )
    requests, server = served(state, device, options.timeout_s)
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: stop.set())
    server.start()
    if server.is_ready.wait(READY_S):
        attachment.set_readahead(directory)
        ready()
    while not server.ended.is_set() and not stop.is_set():
        stop.wait(0.2)
    is_unmounted = server.ended.is_set()
    # After a signal, a file that is still open for writing is incomplete, because the program has not closed it.
    left = publish_all(requests, FLUSH_S, with_open=is_unmounted)
    if not is_unmounted:
        try:
            attachment.detach(directory, lazy=True)
        except OSError as error:
            left.append(f"{directory} is still mounted: {error}")
    for words in left:
        _logger.error("at the end of the mount: %s", words)
    return left


def serve_from_stdin(url: str, directory: str) -> int:
    """Serve a mount as a separate process. Read the options from stdin; write ``ready`` or the error to stdout.

    Each of them is one line of JSON. Returns the exit code.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")

    def ready() -> None:
        print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
        answers.close()

    try:
        left = serve(url, Path(directory), MountOptions.from_json(sys.stdin.readline()), ready)
    except TierfsError as error:
        if answers.closed:
            raise
        print(json.dumps({"kind": error.kind, "message": str(error), "path": error.path}), file=answers, flush=True)
        return error.exit_code
    return 1 if left else 0


def _open(url: str, options: MountOptions) -> MountState:
    location = parse_url(url)
    level = None if options.ack is None else Level.parse(options.ack)
    tiers = TierOptions.from_mapping({**options.tiers, **({"ack": options.ack} if options.ack else {})}, "mount")
    location = replace(location, options={**location.options, **options.options}, tiers=tiers)
    writes = not options.read_only
    if not location.root:
        location = replace(location, root=location.path)  # of a store to make
    store, path = open_store(location, write=writes, create=writes and asks_to_create(location))
    above = path
    while above and (kind := verbs.kind_of(store, above)) != "directory":
        if kind == "file":
            raise InvalidInputError(f"{store.where(above)} is a file: mount the directory that holds it", path=url)
        above = above.rpartition("/")[0]
    if above != path:
        there = shlex.quote(store.where(above))
        raise NotFoundError(
            f"{url} does not exist: `tierfs ls {there}` lists what is there. To make it, mount {there} and run mkdir in it",
            path=url,
        )
    if writes and location.is_remote:
        expect_changes(store)
    staging = state_directory(tiers.state_dir) / "mount"
    make_private(staging.parent)
    make_private(staging)
    return MountState(store, path, staging, level, options.read_only)


def served(state: MountState, device: int, timeout_s: float) -> tuple[Requests, Server]:
    """Make the `Requests` and the `Server` of a mount. The threads of the server are not started yet."""

    def publish_in(seconds: float) -> list[str]:
        server.give_time(seconds)  # `umount` may wait longer than the time limit of requests
        return publish_all(requests, seconds, with_open=False)

    requests = Requests(state, publish_in)
    slow_s = max(SLOW_TIMEOUT_S, timeout_s * 10) if timeout_s >= TIMEOUT_S else timeout_s * 10
    server = Server(device, requests, timeout_s=timeout_s, slow_timeout_s=slow_s, describe=requests.describe)
    state.store.before_change = server.begin_change
    return requests, server


def refuse_own_places(state: MountState, directory: Path) -> None:
    """Refuse to mount over files that this process reads or writes, because it would deadlock.

    Raises:
        InvalidInputError: The directory contains the state directory or the store, or lies in the store.
    """
    mounted = os.path.realpath(directory)
    places = {"the state directory": os.path.realpath(state.staging)}
    kind, _, root = state.store.url.partition("://")
    if kind == "file":
        places["the store"] = os.path.realpath(root)
    for what, place in places.items():
        shared = os.path.commonpath([mounted, place])
        if shared == mounted or (shared == place and what == "the store"):
            raise InvalidInputError(
                f"cannot mount on {directory}: {what} is {place}; mount on a directory outside of it",
                path=str(directory),
            )


def _is_open_for_writing(node: Node) -> bool:
    return any(handle.writes for handle in node.handles)


def publish_all(requests: Requests, timeout_s: float, *, with_open: bool) -> list[str]:
    """Publish each dirty file, and wait until all have reached their level.

    Without ``with_open``, files that are open for writing are skipped.

    Returns:
        One line for each file that is left after ``timeout_s`` seconds.
    """
    state, files = requests.state, requests.files
    deadline_s = time.monotonic() + timeout_s
    left: dict[int, str] = {}
    todo: list[Node] = []
    if not with_open:
        ends_s = min(deadline_s, time.monotonic() + RELEASE_S)
        while any(map(_is_open_for_writing, files.dirty())) and time.monotonic() < ends_s:
            time.sleep(RELEASE_POLL_S)
    for node in files.dirty():
        if not with_open and _is_open_for_writing(node):
            left[node.id] = f"{node.path} is open for writing and not published"
        else:
            todo.append(node)
            left[node.id] = f"{node.path} is not published: it took longer than {timeout_s:g} s"

    def publish() -> None:
        for node in todo:
            if time.monotonic() > deadline_s:
                return
            try:
                files.publish(node)
            except Exception as error:  # noqa: BLE001 - reported at the end; the other files continue
                left[node.id] = f"{node.path} is not published: {error}"
            else:
                left.pop(node.id, None)

    worker = threading.Thread(target=publish, name="tierfs-mount-publish", daemon=True)
    worker.start()
    worker.join(max(0.0, deadline_s - time.monotonic()))
    words = list(left.values())
    level = state.level if state.level is not None else state.store.ack
    if not state.read_only:
        try:
            verbs.wait(state.store, state.root, level, max(0.1, deadline_s - time.monotonic()))
        except (TierfsError, TimeoutError) as error:
            words.append(str(error))
    return words
