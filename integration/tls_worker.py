"""Store, read and verify with certificates trusted by the environment: ``PROTOCOL ROOT OPTIONS DIRECTORY``.

It is a program, because some clients read the environment once, at their import.
"""

from __future__ import annotations

import json
import os
import sys

import tierfs
from tierfs.store import verify

CONTENT = os.urandom(20_000_000)


def main() -> None:
    """Exit with 0 if all content came back."""
    protocol, root, options, directory = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
    store = tierfs.init(f"{protocol}://{root}", options=options)
    assert store.descriptor.endpoint.checksums, "the server verifies none"
    target = {"target_protocol": protocol, "target_options": options}
    here = tierfs.TierFileSystem(**target, ack="object", ram="64MiB", nvme=0, state_dir=f"{directory}/here")
    here.pipe_file(f"{root}/run/data.bin", CONTENT[::-1])
    here.pipe_file(f"{root}/run/data.bin", CONTENT)
    here.mv(f"{root}/run/data.bin", f"{root}/run/moved.bin")
    elsewhere = tierfs.TierFileSystem(**target, ram=0, nvme=0, state_dir=f"{directory}/elsewhere")
    assert elsewhere.ls(f"{root}/run", detail=False) == [f"{root}/run/moved.bin"]
    assert elsewhere.cat_file(f"{root}/run/moved.bin") == CONTENT
    assert elsewhere.cat_file(f"{root}/run/moved.bin", 17_000_000, 17_000_100) == CONTENT[17_000_000:17_000_100]
    assert verify(store).damage == []


if __name__ == "__main__":
    main()
