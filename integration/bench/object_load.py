"""One load of `object.py`, in a process and on a host that have nothing: ``WHO URL BYTES SERVER-URL WHOSE``.

Says ``ready`` when everything is imported and the tensors' memory is warm, waits for a line, loads, and prints what it found.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch.distributed.checkpoint as dcp
from object_checkpoints import STATES, Savers, content
from object_servers import Server

from tierfs.objects import MeasuredObjects


def main() -> None:
    """Load, and say how long it took, what came, and what of tierfs' object tier was asked for that."""
    who, url, size, server_url, whose = sys.argv[1:]
    target = STATES[whose](int(size), 0)
    reader = Savers(Server("load", server_url, "")).reader(who, url)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    dcp.load(target, storage_reader=reader(), no_dist=True)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "content": content(target), "requests": requests(url)}))


def requests(url: str) -> dict[str, int]:
    """What this process asked of the object tier of a store, by method."""
    from tierfs.session.open import _stores

    counted: dict[str, int] = {}
    for store in _stores.values():
        objects: Any = store.objects
        while not isinstance(objects, MeasuredObjects):
            objects = objects.inner
        for method, counters in objects.snapshot().items():
            if counters["requests"]:
                counted[method] = counted.get(method, 0) + int(counters["requests"])
    return counted


if __name__ == "__main__":
    main()
