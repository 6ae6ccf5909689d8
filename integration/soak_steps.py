"""The steps of a soak run: what is done, where, and what dies meanwhile. They follow from the seed alone."""

from __future__ import annotations

import itertools
import random

from soak_hosts import WRITERS

SETTLE_EVERY = 250
NAMES = ("a", "b", "run/1/x", "run/1/y", "latest")
SHARED = ("/all/a", "/all/b", "/all/c/d")  # both hosts change them, at level ``object``
SIZES = (10, 900, 60_000, 70_000, 300_000, 1_300_000)
COMMANDS = (["gc"], ["scrub"], ["scrub", "--tier", "nvme"], ["scrub", "--tier", "ram"], ["evict", "--tier", "ram"])
COMMANDS += (["evict", "--tier", "nvme"], ["status"], ["du"], ["verify"])
FLIPS = (["ram"], ["nvme"], ["ram", "nvme"], ["chunk"], ["record"])
PENDING = ("slot", "draft", "slot head", "draft head", "batch")
KINDS = {"files": 50, "checkpoints": 5, "read": 10, "stale": 5, "flip": 12, "kill": 8, "stop": 2, "command": 2}
KINDS |= {"outage": 1, "lose": 0.8, "fill": 1, "lend": 0.1, "cut": 0.5}
# The other profile: short answers for gc, old ones for readers.
UPKEEP_COMMANDS = (*COMMANDS, ["gc"], ["gc"], ["verify"])
UPKEEP = {"checkpoints": 2, "stale": 40, "flip": 0.5, "kill": 3, "stop": 1, "command": 12}
UPKEEP |= {"outage": 0.3, "lose": 0.2, "fill": 0.2}
CHANGES = {"write": 44, "move": 7, "copy": 5, "remove": 6, "wait": 5, "ack": 3, "evict": 3, "prefetch": 2, "listed": 3}


def schedule(given):
    """Yield the steps that the options of a run ask for."""
    noise, hosts = random.Random(f"soak {given.seed}"), 3 if given.peers else 2
    settle_every = SETTLE_EVERY * (3 if given.upkeep else 1)
    for number in itertools.count(1):
        step = {"do": "settle"} if number % settle_every == 0 else drawn(noise, number, hosts, given.upkeep)
        if given.upkeep and noise.random() < 0.8:  # gc of a killed process keeps its turn for a lease
            step = {name: value for name, value in step.items() if name not in ("kill", "held")}
        if given.peers and step.get("level") == "local" and step["do"] != "lose" and noise.random() < 0.6:
            step["level"] = "peer"
        yield {"n": number, **step}


def drawn(noise, number, hosts, is_upkeep):
    (kind,) = noise.choices([*KINDS], [*(KINDS | (UPKEEP if is_upkeep else {})).values()])
    host, writer = noise.randrange(hosts), noise.randrange(WRITERS)
    match kind:
        case "files":
            return of_files(noise, number, [host, writer])
        case "checkpoints":
            return of_checkpoints(noise, number, [host, WRITERS])
        case "read":
            of = [noise.randrange(hosts), noise.randrange(WRITERS)]
            return {"do": "read", "slot": [host, writer], "of": of, "door": noise.choice(["cat", "open"])}
        case "stale":
            of = noise.choice(["all/", f"h{host}w{writer}"])
            return {"do": "stale", "of": of, "door": noise.choice(["cat", "open"])}
        case "flip":
            step = {"do": "flip", "slot": [host, writer], "name": noise.choice(NAMES), "at": noise.random()}
            if noise.random() < 0.1:
                return {**step, "pending": noise.choice(PENDING), "content": [1000 + number, 300_000]}
            return {**step, "tiers": noise.choice(FLIPS)}
        case "kill":
            back = {"back_ms": round(noise.expovariate(1 / 150)), "older": noise.random() < 0.2}
            return {"do": "kill", "host": host, "who": noise.choice(["flusher"] * 4 + ["mount"]), **back}
        case "stop":
            who = noise.choice(["flusher", "mount", *range(WRITERS)])
            return {"do": "stop", "host": host, "who": who, "ms": noise.choice([20, 300, 2500])}
        case "command":
            words = noise.choice(UPKEEP_COMMANDS if is_upkeep else COMMANDS)
            return {"do": "command", "host": host, "words": words, **kill(noise, 0.3, ["command"])}
        case "outage":
            return {"do": "outage", "ms": noise.choice([50, 300])}
        case "cut":
            return {"do": "cut", "host": host, "ms": noise.choice([300, 3000])}
        case "lend":
            name, to = noise.sample(NAMES[2:4], 2)
            contents = [[1000 + number, 300_000], [1000 + number, 300_001]]
            return {"do": "lend", "slot": [host, writer], "name": name, "to": to, "contents": contents}
        case "fill":
            of = noise.choice(["state", "shm", "store"])
            return {"do": "fill", "host": host, "of": of, "ms": noise.choice([100, 500, 2000])}
    return {"do": "lose", "host": host, "level": noise.choice(["local", "local", "object"])}


def kill(noise, probability, who):
    if noise.random() >= probability:
        return {}
    return {"kill": {"who": noise.choice(who), "ms": round(min(noise.expovariate(1 / 12), 400), 1)}}


def of_files(noise, number, slot):
    (do,) = noise.choices(list(CHANGES), list(CHANGES.values()))
    name, other = noise.sample(NAMES, 2)
    (level,) = noise.choices(("staged", "local", "object"), (5, 3, 2))
    step = {"do": do, "slot": slot}
    is_shared = level == "object" and noise.random() < 0.3
    if is_shared:
        name, other = noise.sample(SHARED, 2)
    match do:
        case "write":
            size = noise.choice(SIZES) if noise.random() < 0.98 else 17_000_000
            # Some contents are those of other writers, too, so that they share chunks.
            content = [noise.randrange(8), 300_000] if noise.random() < 0.2 else [1000 + number, size + number % 7]
            door = noise.choice(["pipe", "open"] if is_shared else ["pipe", "open", "mount"])
            level = "staged" if door == "mount" else level
            step |= {"name": name, "content": content, "level": level, "door": door}
        case "move" | "copy":
            step |= {"name": name, "to": other, "level": level}
        case "remove":
            step |= {"name": name, "level": level}
        case "wait":
            step |= {"level": noise.choice(["local", "object"])}
        case "ack":
            step |= {"name": name}
        case "evict" | "prefetch":
            step |= {"name": name, "tier": noise.choice(["ram", "nvme"])}
    who = ["mount", "mount", "worker", "flusher"] if step.get("door") == "mount" else ["worker"] * 3
    if level != "staged" and noise.random() < 0.15:
        # A level that is reported too early is caught here, above all while the flusher is held.
        return {**step, "held": noise.random() < 0.5, "kill": {"who": level, "ms": noise.randrange(20, 200)}}
    return {**step, **kill(noise, 0.5, [*who, "worker", "flusher", "both", "host"])}


def of_checkpoints(noise, number, slot):
    level = noise.choice(["staged", "local", "object"])
    step = {"do": "save", "slot": slot, "name": noise.choice(["one", "two"]), "number": number, "level": level}
    if noise.random() < 0.3:
        step = {"do": "train", "slot": slot, "count": noise.randrange(1, 4), "level": level}
    return {**step, **kill(noise, 0.5, ["worker", "worker", "flusher", "both"])}
