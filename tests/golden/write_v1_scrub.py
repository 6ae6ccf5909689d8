"""Add a scrub record to the golden store of version 1. Run once, like `write_v1.py`; it is only read later."""

from __future__ import annotations

from pathlib import Path

from tierfs.format.upkeep import PrefixState, ScrubRecord

STORE = Path(__file__).parent / "v1" / "store"


def main() -> None:
    chunk = ".tierfs/chunks/04/04cec85e9cdd2ca1e866465b043aff51.0"
    record = ScrubRecord(
        {"04": PrefixState(1_700_000_000_000_000_000, chunk), "ff": PrefixState(1_700_000_100_000_000_000)},
        {".tierfs/chunks/05/05000000000000000000000000000000.0": "checksum mismatch"},
        {"chunks": 2},
    )
    target = STORE / ".tierfs" / "scrub" / "record"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(record.encode())


if __name__ == "__main__":
    main()
