"""Use a store on two hosts for hours while processes die, the object tier fails and bits flip. Check every byte.

``python integration/soak.py --hours 1 --seed 7 --report FILE``. A seed gives a list of *steps*, which do not depend on
outcomes, so a part of the list can be run again: ``--replay EVENTS`` repeats the steps of a run's event log, and looks
for a shorter list that still fails. `soak_steps` draws the steps, `soak_work` has the processes, `soak_harm` flips
bits, and `support.promises` says which answers are right.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
import peer_cluster
import soak_harm
import soak_work
from servers import ministack
from soak_hosts import Host, fill, mount_small, older_zygote, unmount
from soak_steps import WRITERS, schedule
from struck_objects import STALE_S
from support.killing import Child, Zygote
from support.promises import LEVELS, BrokenPromiseError, Model

import tierfs
from tierfs.session import parse_url
from tierfs.session.open import open_bare
from tierfs.testing import PlannedTcpFault, TcpFault, TcpFaultProxy

PROGRAM = Path(__file__).with_name("soak_work.py")
HANG_S, SETTLE_S = 60, 90
STALE = 8  # the number of the host whose reader gets old answers
LEASE_S, GRACE_S = 5, 12
UPKEEP_LEASE_S, UPKEEP_GRACE_S = 3, 6
LATE_S = 1.6  # after which no late request of `soak_work` is left
RAM, NVME = "32MiB", "64MiB"
OLDER = "0.0.9"
OURS = {"AssertionError", "AttributeError", "IndexError", "KeyError", "TypeError", "ValueError", "ZeroDivisionError"}
"""Errors that no operation may raise."""
EXIT_CODES = {0, 3, 5, 6, 8, 9, 10, 12, -signal.SIGKILL}
"""Of commands: nothing is there, another gc runs, a flip is in progress, the tier fails, is full or forbidden."""


class DiedError(Exception):
    """A worker was killed before it answered."""


def runs(child):
    return child is not None and not child.has_ended()


def reap(child):
    if child is not None:
        child.wait(HANG_S)


def full_name(slot, name):
    """Return a path in the store. A name that begins with a slash is of a file that all writers change."""
    return name[1:] if name and name.startswith("/") else f"{slot.directory}/{name}"


class World:
    """Hosts, a store, what was promised, and the counts of the report."""

    def __init__(self, base, log, given, resources):
        self.base, self.log, self.given = base, log, given
        self.url, self.proxy, self.endpoints = f"file://{base}/disk/store", None, ("", "")
        mount_small(base / "disk", "128m")
        if given.s3:
            server = resources.enter_context(ministack.running())
            self.proxy = resources.enter_context(TcpFaultProxy("127.0.0.1", server.port, seed=given.seed))
            self.endpoints = tuple(f"http://127.0.0.1:{port}" for port in (server.port, self.proxy.port))
            self.url = f"s3://{server.new_root()}"
        soak_work.use_endpoint(self.endpoints[0])
        os.environ |= {"TIERFS_STATE_DIR": str(base / "driver"), "TIERFS_SHM_DIR": str(base)}
        self.lease_s, self.grace_s = (UPKEEP_LEASE_S, UPKEEP_GRACE_S) if given.upkeep else (LEASE_S, GRACE_S)
        tierfs.init(self.url, lease_s=self.lease_s, grace_s=self.grace_s)
        self.objects = open_bare(parse_url(self.url))[0].objects
        words = ["--s3"] * given.s3
        self.zygotes = {"": Zygote(PROGRAM, *words), "torch": Zygote(PROGRAM, "--torch", *words)}
        self.zygotes["older"] = older_zygote(base, given.older, PROGRAM) if given.older else self.zygotes[""]
        for name in ("faults", "faults.past", "gc"):
            (base / name).mkdir()
        self.listener = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self.listener.bind(str(base / "sock"))
        self.listener.listen(4)
        self.listener.settimeout(HANG_S)
        self.hosts = [Host(number, base, WRITERS + 1) for number in range(3 if given.peers else 2)]
        if given.peers:
            (base / "network").mkdir()
            self.network = resources.enter_context(contextlib.closing(peer_cluster.Cluster(base / "network", self.url)))
            for host in self.hosts:
                host.node = self.network.host(f"node{host.number}")
        # Both have no local tiers, and no fault strikes them. The second one gets old answers.
        self.reader, self.stale_reader = (Host(number, base, 1).slots[0] for number in (9, STALE))
        self.model = Model()
        self.timers, self.numbers, self.losable_at = [], itertools.count(), 0
        self.calm_at = self.started = time.monotonic()  # when the last stop or outage ended
        self.trained, self.suspects = Counter(), {}  # the latter are losses, unless conflicts explain them
        self.kills, self.flips, self.damage = Counter(), Counter(), Counter()
        self.done, self.outcomes, self.acknowledged, self.slowest = Counter(), Counter(), Counter(), Counter()
        self.end_outage()
        for host in self.hosts:
            self.start_flusher(host)

    # -- processes

    def start(self, role, host, *, zygote="", **spec):
        number, is_bare = next(self.numbers), host in (self.reader.host, self.stale_reader.host)
        common = {
            "role": role, "url": self.url, "ram": RAM, "nvme": NVME, "bare": is_bare, "mount": str(host.mounted),
            "state": str(host.state), "shm": str(host.shm), "log": str(self.base / f"host{host.number}.log"),
            "socket": str(self.base / "sock"), "notes": str(self.base / "faults"),
            "seed": f"{self.given.seed} {number}", "endpoint": self.endpoints[not is_bare],
            "faults": 0 if is_bare else self.given.faults, "outage": "" if is_bare else str(self.base / "outage"),
            "lies": host.number == STALE or (role == "command" and self.given.faults > 0 and not is_bare),
            "namespace": host.node and host.node.namespace.path, "address": host.node and host.node.address,
            "clock_s": (number % 5 == 4) * (number % 13 - 6) * 3600,
        }  # fmt: skip
        return Child(self.zygotes[zygote], {**common, **spec})

    def command(self, host, *words, **spec):
        child = self.start("command", host, words=words, **spec)
        child.words = words
        return child

    def start_flusher(self, host):
        tiers = ["--state-dir", str(host.state), "--ram", RAM, "--nvme", NVME]
        if host.node:
            tiers += ["--peers", "1", "--peer-listen", host.node.address, "--peer-ram", "0", "--peer-nvme", "32MiB"]
            tiers += ["--bandwidth", "2MB"]  # so that peers hold something
        upkeep = ["--gc-every", "1s" if self.given.upkeep else "4s", "--scrub-bandwidth", "5MB"]
        older = {"version": OLDER, "zygote": "older"} if host.is_older_due else {}
        reap(host.flusher)
        host.flusher = self.command(host, "flusher", "run", f"tierfs::{self.url}", *tiers, *upkeep, **older)
        host.due_at, host.is_older_due = None, False

    def supervise(self):
        """Start flushers again that have ended, as systemd does."""
        for host in self.hosts:
            if not runs(host.flusher):
                host.due_at = host.due_at or time.monotonic() + 0.05
                if time.monotonic() >= host.due_at:
                    self.start_flusher(host)

    def start_mount(self, host):
        """Start the mount of a host until it serves: in an outage it does not start."""
        ends = time.monotonic() + HANG_S
        # A look at the directory itself would wait for a mount that is stopped.
        while not (runs(host.mount) and f" {host.mounted} " in Path("/proc/self/mounts").read_text()):
            if not runs(host.mount):
                unmount(host.mounted)
                reap(host.mount)
                words = ["mount", f"tierfs::{self.url}", str(host.mounted), "--foreground", "--ack", "staged"]
                host.mount = self.command(host, *words, lies=False)  # a rename would copy an old record
            self.pump(0.02)
            if time.monotonic() > ends:
                raise BrokenPromiseError("hang", f"the mount of host {host.number} does not start, see its log")

    def alive(self, slot):
        """Start a process for a slot if it has none. The new one first checks what its predecessors were promised.

        Raises:
            DiedError: It was killed while it did that.
        """
        if slot.socket is not None:
            return
        while runs(slot.child):  # it was killed, but a mount still works for it
            self.pump(0.05)
        reap(slot.child)
        begun = time.monotonic()
        slot.child = self.start("worker", slot.host, zygote=slot.zygote, directory=slot.directory)
        try:
            slot.socket = self.listener.accept()[0]
        except TimeoutError:
            raise BrokenPromiseError("hang", f"a worker of {slot.directory} does not start") from None
        died_at, slot.died_at = slot.died_at, None
        if died_at is not None:
            self.check_own(slot)
            self.note_slowest("recovery_s", time.monotonic() - begun)

    def note_slowest(self, what, seconds):
        self.slowest[what] = max(self.slowest[what], round(seconds, 2))

    def kill(self, who, host, slot=None):
        """Kill processes of a host, and count them. A level stands for the loss of all below it."""
        if who in LEVELS:
            self.do_lose({"host": host.number, "level": who, "at_once": True})
        if who in ("mount", "host"):
            self.kill_one("mount", host.mount)
        if who in ("flusher", "both", "host"):
            self.kill_one("flusher", host.flusher)
        for each in host.slots if who == "host" else [slot] if who in ("worker", "both") else []:
            if each.socket is not None:
                self.kill_one(f"{each.zygote} worker".strip(), each.child)
                self.ended(each)
        for command in host.commands if who in ("command", "host") else ():
            self.kill_one("command", command)

    def end(self, host):
        """Kill all processes of a host, and wait until they have ended."""
        self.kill("host", host)
        unmount(host.mounted)
        for child in (host.flusher, host.mount, *host.commands, *(slot.child for slot in host.slots)):
            reap(child)

    def kill_one(self, what, child):
        if runs(child):
            self.kills[what] += 1
            child.send(signal.SIGKILL)

    def ended(self, slot):
        """Note that the process of a slot is dead. Its operation may have happened or not."""
        slot.socket.close()
        self.outcomes["lost answers"] += slot.flight is not None
        slot.socket, slot.flight, slot.died_at = None, None, time.monotonic()

    def at(self, ms, what):
        heapq.heappush(self.timers, (time.monotonic() + ms / 1000, next(self.numbers), what))

    # -- requests and answers

    def send(self, slot, request, done=lambda answer: None, told=None):
        """Send a request. ``done`` gets the result, unless there is an error or the worker dies."""
        begun = time.monotonic()
        flight = slot.flight = {"begun": begun, "request": request, "done": done, "told": told, "answer": None}
        try:
            words = {name: value for name, value in request.items() if name != "do"}
            slot.socket.send(json.dumps({"do": request["do"], "with": words}).encode())
        except OSError:
            reap(slot.child)
            self.ended(slot)
        return flight

    def call(self, slot, **request):
        """Send a request and return the answer.

        Raises:
            DiedError: The worker was killed first.
        """
        self.until_idle(slot)
        self.alive(slot)
        flight = self.send(slot, request)
        self.until_idle(slot)
        if flight["answer"] is None:
            raise DiedError(slot.directory)
        return flight["answer"]

    def until_idle(self, *slots):
        for slot in slots:
            while slot.flight is not None:
                self.pump(0.05)

    def pump(self, patience_s=0.0):
        """Handle answers and timers until something happened or the time is over."""
        while self.timers and self.timers[0][0] <= time.monotonic():
            heapq.heappop(self.timers)[2]()
        self.supervise()
        if self.timers:
            patience_s = max(0.0, min(patience_s, self.timers[0][0] - time.monotonic()))
        busy = {slot.socket.fileno(): slot for slot in self.slots() if slot.flight is not None}
        poll = select.poll()
        for number in busy:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(patience_s * 1000):
            self.receive(busy[number])
        for slot in busy.values():
            flight = slot.flight
            if flight is not None and time.monotonic() - max(flight["begun"], self.calm_at) > HANG_S:
                slot.child.send(signal.SIGUSR1)  # its stacks go to the log
                time.sleep(1)
                raise BrokenPromiseError("hang", f"{slot.directory} has been busy with {flight['request']}")

    def slots(self):
        return [slot for host in self.hosts for slot in host.slots] + [self.reader, self.stale_reader]

    def receive(self, slot):
        if slot.flight is None:
            return
        data = slot.socket.recv(1 << 20)
        if not data:
            raise BrokenPromiseError("error", f"{slot.directory} ended with {slot.child.wait()}, see {self.base}")
        answer, flight = json.loads(data), slot.flight
        if "seconds" not in answer:
            flight["told"](answer)
            return
        slot.flight, flight["answer"] = None, answer
        self.note_slowest(f"{flight['request']['do']}_s", answer["seconds"])
        if "done" in answer:
            flight["done"](answer["done"])
        else:
            self.refused(slot, flight["request"], answer)

    def refused(self, slot, request, answer):
        """Count an error. The operation may have happened or not."""
        self.log.write(json.dumps({"refused": request, "answer": answer}) + "\n")
        self.outcomes[f"{request['do']}: {answer['error']}"] += 1
        if answer["error"] in OURS:
            raise BrokenPromiseError("error", f"{request}: {answer}")
        if answer["conflict"] and not request.get("name", "").startswith("/"):
            slot.host.has_conflicts = True

    def discard(self, slot):
        """Give up conflicts, as a person would. Only a late request, or a write in an outage, may cause one."""
        if not self.given.faults:
            raise BrokenPromiseError("loss", f"a conflict on host {slot.host.number}")
        found = self.call(slot, do="discard").get("done", ())
        self.outcomes["conflicts"] += len(found)
        for name in [name for name in self.suspects if name.startswith(f"h{slot.host.number}")]:
            broken = self.suspects.pop(name)
            if name not in found:
                raise broken
        for directory in {name.partition("/")[0] for name in found}:  # with what was renamed or copied from them
            self.model.lose(directory, "object")
        slot.host.has_conflicts = False

    # -- steps

    def do(self, step):
        do, slot = step["do"], self.slot(step["slot"]) if "slot" in step else None
        with contextlib.suppress(DiedError):
            if slot is None:
                getattr(self, f"do_{do}")(step)
            else:
                self.until_idle(slot)
                if step.get("door") == "mount":
                    self.start_mount(slot.host)
                self.alive(slot)
                if slot.host.has_conflicts:
                    self.discard(slot)
                if step.get("held") and runs(slot.host.flusher):
                    slot.host.flusher.send(signal.SIGSTOP)
                getattr(self, f"do_{do}", self.change)(slot, step)
        self.done[do if do != "command" else f"tierfs {step['words'][0]}"] += 1
        if "kill" in step and slot is not None:
            self.at(step["kill"]["ms"], lambda: self.kill(step["kill"]["who"], slot.host, slot))
        self.pump()

    def slot(self, place):
        return self.hosts[place[0]].slots[place[1]]

    def change(self, slot, step):
        """Send a change, and acknowledge it in the model when its answer arrives."""
        name, other, level = (step.get(each) for each in ("name", "to", "level"))
        kept = self.possible(slot, name) - {None}
        changes = {
            "write": [(name, {tuple(step.get("content", ()))})],
            "save": [(name, {step.get("number")})],
            "remove": [(name, {None})],
            "copy": [(other, kept)],
            "move": [(other, kept), (name, {None})],
        }.get(step["do"], ())
        paths = [(self.model.path(full_name(slot, each)), values) for each, values in changes if values]
        attempts = [(path, path.begin(values)) for path, values in paths]
        if step["do"] in ("wait", "ack"):
            known = self.model.below(slot.directory)
            waited = [
                path for each, path in known.items() if step["do"] == "wait" or each == f"{slot.directory}/{name}"
            ]
            attempts = [(path, path.floors["staged"]) for path in waited]

        def done(result):
            for path, index in attempts if not (name or "").startswith("/") else ():
                if (result or level) not in (None, "none"):
                    path.acknowledge(index, result or level)
            if step["do"] in ("write", "save"):
                self.acknowledged[level] += step["content"][1] if "content" in step else 80_000

        self.send(slot, {each: step[each] for each in step if each not in ("n", "slot", "kill", "held")}, done)

    def possible(self, slot, name):
        path = self.model.path(full_name(slot, name))
        return path.possible(path.floors["staged"])

    def do_listed(self, slot, step):
        floors = {name: path.floors["staged"] for name, path in self.model.below(slot.directory).items()}

        def done(result):
            found = {f"{slot.directory}/{name}" for name in result}
            for name, floor in floors.items():
                values = self.model.path(name).possible(floor)
                if (None not in values and name not in found) or (values == {None} and name in found):
                    told = f"a listing of {slot.directory} has {sorted(found)}; {name} is one of {values}"
                    slot.host.has_conflicts, self.suspects[name] = True, BrokenPromiseError("loss", told)

        self.send(slot, {"do": "listed"}, done)

    def do_stale(self, step):
        """Let a reader that gets old answers read all files of a directory: any version since the last audit is right."""
        self.until_idle(self.stale_reader)
        self.alive(self.stale_reader)
        self.check(self.stale_reader, step["of"], step["door"])

    def do_read(self, slot, step):
        self.check(slot, self.slot(step["of"]).directory, step["door"])

    def check_own(self, slot):
        self.check(slot, slot.directory, "cat")
        self.until_idle(slot)
        if slot.socket is None:
            raise DiedError(slot.directory)

    def check(self, slot, directory, door, names=None):
        """Let a slot read all files of a directory, or these, and check the answers when they arrive."""
        level = "staged" if directory.startswith(f"h{slot.host.number}") else "object"
        known = self.model.below(directory) if names is None else {name: self.model.path(name) for name in names}
        level = None if slot is self.stale_reader else level
        floors = {name: path.floors.get(level, 0) for name, path in known.items() if not name.endswith("/trained")}
        is_calm = time.monotonic() > self.calm_at

        def done(result):
            self.done["files read"] += len(floors)
            for name, found in result.items():
                if not is_calm and isinstance(found, str) and found.startswith("error: "):
                    self.outcomes["reads in an outage or a stop"] += 1
                    continue
                try:
                    index = self.model.check(name, found, floors[name], slot.directory)
                except BrokenPromiseError as broken:
                    if level != "staged":
                        raise
                    slot.host.has_conflicts, self.suspects[name] = True, broken
                    continue
                if directory == slot.directory:
                    self.model.path(name).acknowledge(index, "staged")

        if floors:
            do = "load" if directory.endswith(f"w{WRITERS}") else "read"
            self.send(slot, {"do": do, "paths": list(floors), "door": door}, done)

    def do_train(self, slot, step):
        name = f"{slot.directory}/trained"
        path, first = self.model.path(name), self.trained[name]
        floor = path.floors["staged"]
        self.trained[name] += step["count"]
        indexes = {number: path.begin([number]) for number in range(first, first + step["count"])}

        def told(answer):
            if "restored" in answer:
                path.acknowledge(self.model.check(name, answer["restored"], floor, slot.directory), "staged")
            else:
                path.acknowledge(indexes[answer["saved"]], step["level"])
                self.acknowledged[step["level"]] += 20_000

        self.send(slot, {"do": "train", "first": first, "count": step["count"], "level": step["level"]}, told=told)

    def do_lend(self, slot, step):
        """Copy a file beside a pending one, and delete it. There is no flusher for two graces, while others run gc."""
        lent = f"/lent/{step['n']}"
        content, other = step["contents"]
        if "error" in self.call(self.reader, do="write", name=lent, content=content, level="object", door="pipe"):
            return
        self.kill("flusher", slot.host)
        slot.host.due_at = time.monotonic() + 2 * self.grace_s + 22  # each change waits for a flusher for 10 s
        self.calm_at = max(self.calm_at, slot.host.due_at)
        for seconds in range(self.grace_s, 2 * self.grace_s + 22, 5):
            self.at(seconds * 1000, lambda: self.do_command({"host": slot.host.number - 1, "words": ["gc"]}))
        index = self.model.path(full_name(slot, step["name"])).begin([tuple(other)])
        if "error" not in self.call(slot, do="write", name=step["name"], content=other, level="staged", door="pipe"):
            self.model.path(full_name(slot, step["name"])).acknowledge(index, "staged")
        path = self.model.path(full_name(slot, step["to"]))
        index = path.begin([tuple(content)])
        self.send(slot, {"do": "copy", "name": lent, "to": step["to"]}, lambda _: path.acknowledge(index, "staged"))
        self.pump(1)
        self.call(self.reader, do="remove", name=lent, level="object")

    def do_kill(self, step):
        host = self.hosts[step["host"]]
        self.kill(step["who"], host)
        host.due_at, host.is_older_due = time.monotonic() + step["back_ms"] / 1000, step["older"]

    def do_stop(self, step):
        host = self.hosts[step["host"]]
        child = host.slots[step["who"]].child if isinstance(step["who"], int) else getattr(host, step["who"])
        if runs(child):
            child.send(signal.SIGSTOP)
            self.outcomes["stops"] += 1
            self.calm_at = max(self.calm_at, time.monotonic() + step["ms"] / 1000)
            self.at(step["ms"], lambda: child.send(signal.SIGCONT))

    def do_outage(self, step):
        """Let the object tier refuse every request for a while."""
        (self.base / "outage").touch()
        if self.proxy is not None:
            self.proxy.fail(PlannedTcpFault(TcpFault.UNAVAILABLE, side="request"))
        self.outcomes["outages"] += 1
        self.calm_at = max(self.calm_at, time.monotonic() + step["ms"] / 1000)
        self.at(step["ms"], self.end_outage)

    def do_fill(self, step):
        """Take all that is left of a filesystem for a while."""
        host = self.hosts[step["host"]]
        ballast = fill({"state": host.state, "shm": host.shm}.get(step["of"], self.base / "disk"))
        self.outcomes[f"full: {step['of']}"] += 1
        self.calm_at = max(self.calm_at, time.monotonic() + step["ms"] / 1000)
        self.at(step["ms"], lambda: ballast.unlink(missing_ok=True))

    def end_outage(self):
        (self.base / "outage").unlink(missing_ok=True)
        if self.proxy is not None:
            self.proxy.random, self.proxy.probability = soak_work.TCP_FAULTS, self.given.faults

    def do_command(self, step):
        host = self.hosts[step["host"]]
        host.commands = [each for each in host.commands if runs(each) or self.check_command(each)]
        host.commands.append(self.command(host, *step["words"], f"tierfs::{self.url}"))
        if "kill" in step:
            self.at(step["kill"]["ms"] * 10, lambda: self.kill("command", host))

    def check_command(self, command):
        status = command.wait(HANG_S)
        self.outcomes[f"{command.words[0]}: exit {status}"] += 1
        if status not in EXIT_CODES:
            raise BrokenPromiseError("error", f"tierfs {' '.join(command.words)} ends with {status}, see {self.base}")

    def do_lose(self, step):
        """End all processes of a host, and lose its shared memory; above level ``local``, lose all that it had."""
        host, level = self.hosts[step["host"]], step["level"]
        if host.node and level != "local":
            if time.monotonic() < self.losable_at:  # the hosts do not hold all twice again
                host.flusher.send(signal.SIGCONT)
                return
            if "at_once" not in step:  # only peers hold what is written meanwhile: the object tier is full
                self.do_fill({"host": host.number, "of": "store", "ms": 3000})
                for slot in [each for each in host.slots[:WRITERS] if each.socket is not None and each.flight is None]:
                    content = [10**6 + next(self.numbers), 300_000]
                    self.change(slot, {"do": "write", "name": "a", "content": content, "level": "peer", "door": "pipe"})
                self.at(2500, lambda: self.do_lose({**step, "at_once": True}))
                return
            self.losable_at, level = math.inf, "peer"
        self.end(host)
        host.make(*((host.shm,) if level == "local" else (host.shm, host.state)))
        self.model.lose(f"h{host.number}", level)
        self.outcomes[f"all below {level} lost"] += 1
        if level == "peer":
            self.await_adoption(host)
            self.losable_at = time.monotonic() + 3 * self.lease_s

    def await_adoption(self, host):
        """Wait until the peers of a lost host have brought to the object tier all that they hold of it."""
        begun = time.monotonic()
        for slot in host.slots:
            known = [name for name in self.model.below(slot.directory) if not name.endswith("/trained")]
            do = "load" if slot.zygote else "read"
            while left := [
                name for name in known if self.model.path(name).floors["object"] < self.model.path(name).floors["peer"]
            ]:
                for name, found in self.call(self.reader, do=do, paths=left, door="cat")["done"].items():
                    path = self.model.path(name)
                    if (index := path.index_of(found, path.floors["peer"])) is not None:
                        path.acknowledge(index, "object")
                    elif time.monotonic() - max(begun, self.calm_at) > SETTLE_S:
                        self.model.check(name, found, path.floors["peer"], "a reader after the loss of a host")
                self.pump(0.5)
        self.note_slowest("adoption_s", time.monotonic() - begun)

    def do_cut(self, step):
        """Let nothing pass between a host and its peers for a while."""
        host = self.hosts[step["host"]]
        if host.node:
            self.network.cut(host.node)
            self.outcomes["cuts"] += 1
            self.at(step["ms"], lambda: self.network.heal(host.node))

    def do_flip(self, slot, step):
        self.alive(self.reader)
        if "pending" in step:
            soak_harm.flip_pending(self, slot, step["name"], step["pending"], step["content"], step["at"])
        else:
            soak_harm.flip(self, slot, step["name"], step["tiers"], step["at"])

    # -- everything in the object tier

    def do_settle(self, step):
        """Wait until everything is in the object tier, and check all of it there, and on each host."""
        self.until_idle(*self.slots())
        while self.timers or time.monotonic() < self.calm_at + LATE_S:
            self.pump(0.1)
        begun = time.monotonic()
        for host in self.hosts:
            while "error" in self.call(host.slots[0], do="wait", level="object", everything=True):
                if host.has_conflicts:
                    self.discard(host.slots[0])
                if time.monotonic() - begun > SETTLE_S:
                    raise BrokenPromiseError("hang", f"host {host.number} does not settle: see {self.log.name}")
            for path in self.model.below(f"h{host.number}").values():
                path.acknowledge(path.floors["staged"], "object")
            host.commands = [each for each in host.commands if self.check_command(each)]
        self.note_slowest("settling_s", time.monotonic() - begun)
        self.calm_at = time.monotonic()
        self.audit()
        while time.monotonic() < self.calm_at + STALE_S:  # the stale reader sees nothing of before
            self.pump(0.1)
        self.done["audits"] += 1

    def audit(self):
        """Check everything by a process without local tiers, then on its host. Forget what is superseded."""
        for host in self.hosts:
            for slot in host.slots:
                self.alive(self.reader)
                self.check(self.reader, slot.directory, "cat")
                self.alive(slot)
                self.check_own(slot)
                if host.has_conflicts:
                    self.discard(slot)
                self.until_idle(self.reader)
        for name, found in self.call(self.reader, do="read", paths=list(self.model.below("all/")))["done"].items():
            self.model.path(name).acknowledge(self.model.check(name, found, 0, "a reader"), "staged")
        for name, path in self.model.paths.items():
            path.settle(is_read=not name.endswith("/trained"))
        if (status := self.command(self.reader.host, "verify", f"tierfs::{self.url}").wait(HANG_S)) != 0:
            raise BrokenPromiseError("loss", f"tierfs verify ends with {status}, see {self.base}/host9.log")

    # -- the report

    def figures(self, failure):
        kinds = {"loss": "losses", "wrong bytes": "wrong_bytes", "hang": "hangs", "error": "errors"}
        faults, gc = (
            Counter({path.name: path.stat().st_size for path in (self.base / name).iterdir()})
            for name in ("faults", "gc")
        )
        faults.update(fault.value for fault, *_ in (self.proxy.fired if self.proxy else ()))
        faults.update({kind: count for kind, count in self.outcomes.items() if kind.startswith(("full: ", "cuts"))})
        counts = {"kills": self.kills, "faults": faults, "flips": self.flips, "damage": self.damage, "gc": gc}
        counts |= {"operations": self.done, "acknowledged_bytes": self.acknowledged, "outcomes": self.outcomes}
        return {
            "seconds": round(time.monotonic() - self.started),
            **{name: dict(sorted(count.items())) for name, count in counts.items()},
            "slowest": dict(self.slowest),
            **{name: int(failure is not None and failure.kind == kind) for kind, name in kinds.items()},
        }

    def close(self):
        for host in [*self.hosts, self.reader.host, self.stale_reader.host]:
            self.end(host)
        for zygote in set(self.zygotes.values()):
            zygote.close()


# -- runs --------------------------------------------------------------------------------------------------------------


def run(steps, given, ends_at, events, *, keep=True):
    """Run steps until the time is over. Return the figures, and the failure if there was one."""
    base = Path(tempfile.mkdtemp(prefix="tierfs-soak-", dir="/dev/shm"))
    failure = None
    with contextlib.ExitStack() as resources, events.open("w") as log:
        world = World(base, log, given, resources)
        try:
            for step in steps:
                log.write(json.dumps({"step": step, "s": round(time.monotonic() - world.started, 3)}) + "\n")
                world.do(step)
                if time.monotonic() > ends_at:
                    break
            world.do_settle({})
        except (BrokenPromiseError, AssertionError) as failed:  # a process that does not end is an AssertionError
            failure = failed if isinstance(failed, BrokenPromiseError) else BrokenPromiseError("hang", str(failed))
            log.write(json.dumps({"failed": str(failure)}) + "\n")
        finally:
            figures = world.figures(failure)
            world.close()
            if failure is not None and keep:
                kept = Path(tempfile.gettempdir(), f"soak-failed-{given.seed}-{os.getpid()}")
                shutil.copytree(base, kept, ignore=shutil.ignore_patterns("*sock", "older"))
                print(f"{failure}\nkept: {kept}", file=sys.stderr)
            for path in base.iterdir():
                unmount(path)
            shutil.rmtree(base, ignore_errors=True)
    return figures, failure


def replay(given, ends_at):
    """Run the steps of an event log again, and look for a shorter list that still fails."""
    lines = map(json.loads, given.replay.read_text().splitlines())
    steps, again = [line["step"] for line in lines if "step" in line], given.replay.with_suffix(".again")
    failure = run(steps, given, ends_at, again)[1]
    print(f"{len(steps)} steps: {failure}")
    size = len(steps) // 2
    while failure is not None and size and time.monotonic() < ends_at:
        shorter = (steps[:at] + steps[at + size :] for at in range(0, len(steps), size))
        fewer = next((some for some in shorter if run(some, given, ends_at, again, keep=False)[1] is not None), None)
        steps, size = (fewer, min(size, len(fewer) // 2)) if fewer else (steps, size // 2)
    shortest = given.replay.with_suffix(".shortest")
    shortest.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    print(f"the shortest list has {len(steps)} steps: {shortest}")
    return failure


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=float, default=0.03, help="probability that a request to the store fails")
    parser.add_argument("--s3", action="store_true", help="keep the store on an S3 server behind a faulty proxy")
    parser.add_argument("--peers", action="store_true", help="three hosts in network namespaces hold changes twice")
    parser.add_argument("--upkeep", action="store_true", help="most steps are gc, scrub, and reads of old answers")
    parser.add_argument("--older", metavar="COMMIT", help="let some flushers run the code of this commit")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--events", type=Path, help="the event log; it is removed if nothing fails")
    parser.add_argument("--replay", type=Path, metavar="EVENTS")
    given = parser.parse_args()
    if "SOAK_MOUNTS" not in os.environ:  # mounts of its own end with its processes
        os.environ["SOAK_MOUNTS"] = "own"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends all processes of the run
    ends_at = time.monotonic() + given.hours * 3600
    if given.replay:
        sys.exit(replay(given, ends_at) is not None)
    events = given.events or Path(tempfile.gettempdir(), f"soak-{os.getpid()}.jsonl")
    figures, failure = run(schedule(given), given, ends_at, events)
    options = [f"--{name} {value}" for name in ("hours", "seed", "faults", "older") if (value := vars(given)[name])]
    options += [f"--{name}" for name in ("s3", "peers", "upkeep") if vars(given)[name]]
    report = {
        "command": " ".join(["python integration/soak.py", *options]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cores": os.cpu_count()},
        "failure": None if failure is None else str(failure),
        "figures": figures,
    }
    text = json.dumps(report, indent=1)
    if given.report:
        given.report.write_text(text + "\n")
    print(text)
    if failure is not None:
        sys.exit(f"again: {report['command']} --replay {events}")
    events.unlink()


if __name__ == "__main__":
    main()
