"""Add a collector's record to the golden store of version 1. Run once, like `write_v1.py`; it is only read later."""

from __future__ import annotations

from pathlib import Path

from tierfs.format.upkeep import Collector, EpochState

STORE = Path(__file__).parent / "v1" / "store"


def main() -> None:
    record = Collector(
        holder=bytes(range(16)),
        fence=1_700_000_001,
        sequence=3,
        duration_s=60,
        epochs={
            1: EpochState(1_700_000_100_000_000_000),
            2: EpochState(1_700_000_000_000_000_000, 1_700_003_700_000_000_000),
        },
        last={"files": 3},
    )
    (STORE / ".tierfs" / "gc" / "collector").write_bytes(record.encode())


if __name__ == "__main__":
    main()
