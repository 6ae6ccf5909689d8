"""Add a reference list to the golden store of version 1. Run once, like `write_v1.py`; it is only read later."""

from __future__ import annotations

from pathlib import Path

from tierfs.digest import DigestKind
from tierfs.format.keys import record_key, references_key
from tierfs.format.references import ReferenceList, record_check

STORE = Path(__file__).parent / "v1" / "store"


def main() -> None:
    """Write the list of a checkpoint that does not exist, so that anyone may delete the list."""
    checks = [record_check(record_key(f"run/step_1/{name}"), f"v{name}") for name in (".metadata", "__0_0.distcp")]
    digests = (bytes.fromhex("04cec85e9cdd2ca1e866465b043aff51"), bytes(range(240, 256)))
    names = [digest + bytes(12) for digest in digests]
    listed = ReferenceList.of("run/step_1", DigestKind.XXH3_128, checks, names)
    target = STORE / references_key("run/step_1")
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(listed.encode())


if __name__ == "__main__":
    main()
