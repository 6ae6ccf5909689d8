"""Hosts of a cluster on one machine, each a network namespace with a state directory and memory of its own.

    with Cluster(base, url) as cluster:
        a, b = cluster.host("a").start(), cluster.host("b").start()
        a.run(save, ...)       # in a process of host a
        cluster.cut(a)         # nothing reaches it, and nothing comes from it
        cluster.heal(a)
        a.kill()               # its flusher
        a.remove()             # the host is lost, without a farewell

It needs root. Without it, hosts have addresses of the loopback, and links cannot be cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

import fsspec
from support import forked_flusher
from support.peer_hosts import LEASE_S, PeerHost, until
from support.zygote import Zygote

from tierfs.testing import TcpFaultProxy

PORT = 7946
WAIT_S = 120.0
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:01"
_libc = ctypes.CDLL(None, use_errno=True)
_programs = Zygote("torch.distributed.checkpoint", "tierfs.dcp", "tierfs.fs.filesystem", "tierfs.train.manager")


def can_cut() -> bool:
    """Return whether this process may make network namespaces."""
    try:
        Namespace().close()
    except (OSError, subprocess.SubprocessError):
        return False
    return True


class Namespace:
    """A network namespace. It ends with `close`, and with this process."""

    def __init__(self) -> None:
        # The child ends with the pipe, so that nothing stays behind when this process is killed.
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.path = f"/proc/{self._keeper.pid}/ns/net"
        try:
            own = os.readlink("/proc/self/ns/net")
            end = time.monotonic() + WAIT_S
            while os.readlink(self.path) == own:
                if self._keeper.poll() is not None or time.monotonic() > end:
                    raise PermissionError("no network namespace can be made here")
                time.sleep(0.005)
            self.ip("link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def ip(self, *words: str) -> None:
        subprocess.run(["nsenter", f"--net={self.path}", "ip", *words], check=True, timeout=WAIT_S)

    def plug(self, other: Namespace, name: str) -> None:
        """Connect two namespaces by a cable: ``eth0`` here, ``name`` there."""
        self.ip("link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", str(other._keeper.pid))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread be in the namespace. A socket stays where it was made."""
        own = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        with open(own, "rb") as back:
            enter(self.path)
            try:
                yield
            finally:
                _set_namespace(back.fileno())

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()


def enter(path: str) -> None:
    """Move this thread, and those that it starts, to a namespace."""
    with open(path, "rb") as file:
        _set_namespace(file.fileno())


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


class Relay:
    """Passes the connections that a socket accepts on to another place, from thread to thread."""

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        self._listener, self._connect = listener, connect
        self._open: set[socket.socket] = set()
        self.port = int(listener.getsockname()[1])
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(accepted,), name="relay", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with accepted:
            try:
                there = self._connect()
            except OSError:
                return
            with there:
                self._open |= {accepted, there}
                back = threading.Thread(target=_pump, args=(there, accepted), name="relay", daemon=True)
                back.start()
                _pump(accepted, there)
                back.join()
                self._open -= {accepted, there}

    def close(self) -> None:
        for end in (self._listener, *list(self._open)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Program:
    """A process on a host that calls functions. Their modules have to be importable."""

    def __init__(self, host: ClusterHost) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = _programs.start(_call_all, host.place(), theirs)
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((function, arguments))

    def result(self, timeout: float = WAIT_S) -> Any:
        """Return what the function that was begun returned. Raises what it raised."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"a program on a host did not answer within {timeout} s")
        value, trace = self._pipe.recv()
        if isinstance(value, Exception):
            raise value from RuntimeError(trace)
        return value

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = WAIT_S) -> Any:
        self.begin(function, *arguments)
        return self.result(timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _call_all(place: Place, pipe: Any) -> None:
    settle(place)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[Any, str] = function(*arguments), ""
        except Exception as error:
            answer = error, traceback.format_exc()
        pipe.send(answer)


Place = tuple[str | None, dict[str, str], float]
"""The namespace, the environment and the clock's error of a process on a host."""


def settle(place: Place) -> None:
    """Let this process be on a host."""
    namespace, environment, skew_s = place
    if namespace is not None:
        enter(namespace)
    os.environ.update(environment)
    if skew_s:
        now_s, now_ns = time.time, time.time_ns
        time.time = lambda: now_s() + skew_s
        time.time_ns = lambda: now_ns() + int(skew_s * 1e9)


def _flush(place: Place, words: list[str], log: str) -> None:
    settle(place)
    forked_flusher.run(words, log)


_opened: dict[str, Any] = {}


def filesystem(url: str, settings: dict[str, Any]) -> tuple[Any, str]:
    """Return this process's filesystem for a host's settings, and the store's root."""
    key = f"{url} {settings['state_dir']}"
    if key not in _opened:
        _opened[key] = fsspec.core.url_to_fs(f"tierfs::{url}", skip_instance_cache=True, **settings)
    return _opened[key]


def status(url: str, settings: dict[str, Any]) -> dict[str, Any]:
    fs, root = filesystem(url, settings)
    return fs.status(root)


class ClusterHost(PeerHost):
    """A host of a `Cluster`, which makes it.

    Attributes:
        bucket: The way to the bucket, if that is a server: a proxy for this host alone.
        skew_s: How far the wall clock of processes that start from now on is ahead.
    """

    def __init__(self, cluster: Cluster, name: str, number: int, **settings: Any) -> None:
        self.cluster, self.number = cluster, number
        self.address = f"10.99.0.{number}" if cluster.switch is not None else f"127.0.0.{number}"
        self.bucket: TcpFaultProxy | None = None
        self.skew_s = 0.0
        self.memory = cluster.memory / name
        self.memory.mkdir()
        self._programs: list[Program] = []
        self.namespace = None if cluster.switch is None else Namespace()
        self._relays: list[Relay] = []
        super().__init__(cluster.base, name, cluster.url, PORT, peer_listen=f"{self.address}:{PORT}", **settings)
        if self.namespace is not None:
            self.namespace.plug(cluster.switch, self.cable)
            self.namespace.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
            self.namespace.ip("link", "set", "eth0", "up")
            cluster.switch.ip("link", "set", self.cable, "master", "bridge", "up")
        if cluster.bucket_port is not None:
            self._reach_bucket(cluster.bucket_port)

    @property
    def cable(self) -> str:
        """The name of this host's port of the switch."""
        return f"host{self.number}"

    def _reach_bucket(self, port: int) -> None:
        assert self.namespace is not None, "without a namespace, all hosts would share the way to the bucket"
        self.bucket = proxy = TcpFaultProxy("127.0.0.1", port)
        with self.namespace.entered():
            listener = socket.create_server(("127.0.0.1", port))
        self._relays.append(Relay(listener, lambda: socket.create_connection(("127.0.0.1", proxy.port))))

    def place(self) -> Place:
        environment = {"TIERFS_STATE_DIR": str(self.state), "TIERFS_SHM_DIR": str(self.memory)}
        return self.namespace and self.namespace.path, environment, self.skew_s

    def _spawn(self, words: list[str]) -> Any:
        log = str(self.state / "sidecar.log")
        return forked_flusher.zygote.start(_flush, self.place(), words, log, daemon=True)

    def program(self) -> Program:
        """Start a process on this host, for `Program.run`."""
        self._programs.append(Program(self))
        return self._programs[-1]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = WAIT_S) -> Any:
        """Call a function in this host's first process."""
        return (self._programs[0] if self._programs else self.program()).run(function, *arguments, timeout=timeout)

    @property
    def options(self) -> dict[str, Any]:
        """Options of a filesystem or a manager of this host."""
        return {**self.settings, "state_dir": str(self.state)}

    def status(self) -> dict[str, Any]:
        return self.run(status, self.url, self.options)

    def memory_bytes(self) -> int:
        """Return the memory of the flusher, and of all that the host has in shared memory."""
        lines = Path(f"/proc/{self._flusher.pid}/status").read_text().splitlines()
        private = next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
        shared = 0
        for file in self.memory.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                shared += file.stat().st_blocks * 512
        return private + shared

    def kill_programs(self) -> None:
        while self._programs:
            self._programs.pop().kill()

    def remove(self) -> None:
        """Lose the host: its network first, so that no other host hears of it, then its processes and all it had."""
        if self.namespace is not None and self.state.exists():
            self.cluster.cut(self)
        self.kill_programs()
        self.kill()
        if self.namespace is not None:
            for relay in self._relays:
                relay.close()
            self.namespace.close()
        if self.bucket is not None:
            self.bucket.close()
        for directory in (self.memory, self.state):
            shutil.rmtree(directory, ignore_errors=True)

    lose = close = remove


class Cluster:
    """A switch, and hosts at it that share a store.

    Args:
        base: Holds the hosts' state directories.
        url: The store, without ``tierfs::``. It exists.
        bucket_port: The port of 127.0.0.1 at which the store's server listens, for hosts as for this process.
    """

    def __init__(self, base: Path, url: str, *, bucket_port: int | None = None) -> None:
        self.base, self.url, self.bucket_port = base, url, bucket_port
        self.memory = Path(tempfile.mkdtemp(prefix="tierfs-test-", dir="/dev/shm"))
        self.hosts: dict[str, ClusterHost] = {}
        self._ends = contextlib.ExitStack()
        self._numbers = iter(range(2, 255))
        self.switch = Namespace() if can_cut() else None
        if self.switch is not None:
            self.switch.ip("link", "add", "bridge", "type", "bridge")
            self.switch.ip("link", "set", "bridge", "up")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        print(self.report())  # pytest shows it if the test failed
        self.close()

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        self._ends.close()
        if self.switch is not None:
            self.switch.close()
        shutil.rmtree(self.memory, ignore_errors=True)

    def host(self, name: str, **settings: Any) -> ClusterHost:
        """Make a host; `ClusterHost.start` starts its flusher. The settings are those of `PeerHost`."""
        self.hosts[name] = host = ClusterHost(self, name, next(self._numbers), **settings)
        return host

    def report(self) -> str:
        """Return the state and the log of each host, for a person."""
        parts = []
        for name, host in self.hosts.items():
            if host.state.exists():
                try:
                    found: Any = host.status()
                except Exception as error:
                    found = error
                parts.append(f"== {name} at {host.address}: {found}\n{host.log()[-3000:]}")
        return "\n".join(parts)

    def cut(self, host: ClusterHost, *others: ClusterHost) -> None:
        """Let nothing pass between a host and some others, or all. It can reach the bucket."""
        assert self.switch is not None
        if not others:
            self.switch.ip("link", "set", host.cable, "down")
        for other in others:
            self.half_cut(host, other)
            self.half_cut(other, host)

    def half_cut(self, source: ClusterHost, target: ClusterHost) -> None:
        """Let nothing pass from a host to another one. The other direction stays."""
        source.namespace.ip("neigh", "replace", target.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def heal(self, host: ClusterHost) -> None:
        """Let everything pass to and from a host again."""
        assert self.switch is not None
        self.switch.ip("link", "set", host.cable, "up")
        for other in self.hosts.values():
            if other is not host and other.state.exists():
                for one, two in ((host, other), (other, host)):
                    one.namespace.ip("neigh", "flush", "to", two.address, "nud", "permanent", "dev", "eth0")

    def lead_through_proxy(self, source: ClusterHost, target: ClusterHost) -> TcpFaultProxy:
        """Let connections from a host to another one pass a proxy from now on, which this returns."""
        # The other host's address is one of this host's own, where a relay listens.
        source.namespace.ip("addr", "add", f"{target.address}/32", "dev", "lo")
        with source.namespace.entered():
            listener = socket.create_server((target.address, PORT))

        def reach() -> socket.socket:
            with target.namespace.entered():
                return socket.create_connection((target.address, PORT), timeout=5)

        inner = Relay(socket.create_server(("127.0.0.1", 0)), reach)
        proxy = TcpFaultProxy("127.0.0.1", inner.port, seed=1)
        outer = Relay(listener, lambda: socket.create_connection(("127.0.0.1", proxy.port)))
        for part in (inner, proxy, outer):
            self._ends.callback(part.close)
        return proxy


__all__ = ["LEASE_S", "Cluster", "ClusterHost", "filesystem", "until"]
