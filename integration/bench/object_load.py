"""One load of `object.py`, in a new process on a host without state: ``WHO URL BYTES SERVER-URL WHOSE``.

It prints ``ready`` when imports are done and the tensors' memory is warm, waits for a line, loads, and prints JSON.
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
    """Load. Print the seconds, a checksum of the content, and the requests to tierfs's object tier."""
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
    """Return this process's requests to a store's object tier, by method."""
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
