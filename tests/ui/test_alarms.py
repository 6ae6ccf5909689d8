"""`alarms_in`: every thing that is wrong is named, with a command of tierfs that exists."""

import pytest

from tierfs.cli.app import COMMANDS
from tierfs.ui.view import NOTE, PROBLEM, alarms_in

NOW_S = 1_800_000_000.0
DAY_NS = 86400 * 10**9
QUIET = {
    "store": "s3://bucket/run",
    "tiers": {
        "object": {"gives": "object"},
        "ram": {"gives": "staged", "budget_bytes": 100, "dirty_bytes": 10, "damaged": 0},
    },
    "flusher": {"running": False},
    "queue_files": 0,
    "queue_bytes": 0,
    "oldest_age_s": 0.0,
    "conflicts": [],
    "errors": [],
    "counters": {},
    "misplaced": [],
    "unused_folders": [],
}
RUNS = {"flusher": {"running": True, "pid": 1}}
ERROR = {"path": "run/a", "message": "access denied", "attempts": 3}
CASES = {
    "old data": (
        RUNS | {"queue_files": 2, "queue_bytes": 2048, "oldest_age_s": 4000.0},
        PROBLEM,
        "waited up to 1.1 h",
    ),
    "no flusher": ({"queue_files": 1, "queue_bytes": 5, "oldest_age_s": 1.0}, PROBLEM, "no flusher runs"),
    "silence": ({"flusher": {"running": True, "silent": "no answer in 5 s"}}, PROBLEM, "no answer in 5 s"),
    "failure": (RUNS | {"errors": [ERROR], "failing_files": 4}, PROBLEM, "of 4 files fails, 3 attempts: run/a"),
    "conflict": ({"conflicts": [{"path": "run/a", "message": "changed"}]}, PROBLEM, "1 file in conflict: run/a"),
    "damage": ({"upkeep": {"scrub": {"known_damaged": 2}}}, PROBLEM, "2 chunks of the object tier known to be damaged"),
    "missing chunks": ({"missing_chunks": 1}, PROBLEM, "1 chunk missing"),
    "vanished": ({"vanished_records": 3}, PROBLEM, "3 records missing"),
    "lost": ({"lost_bytes": 1024}, NOTE, "1 KiB lie in .tierfs/lost/"),
    "bad reads": ({"counters": {"process_bad_local_copies": 1}}, NOTE, "1 damaged piece"),
    "unreadable": ({"unreadable_drafts": 1, "unread_segments": 1}, PROBLEM, "2 changes of this host cannot be read"),
    "tier off": ({"tiers": {"nvme": {"gives": "", "problem": "disk full"}}}, PROBLEM, "disk full"),
    "tier full": ({"tiers": {"ram": {"budget_bytes": 100, "dirty_bytes": 95}}}, PROBLEM, "ram tier is full"),
    "no peers": ({"peer_problem": "no certificate"}, PROBLEM, "no certificate"),
    "few peers": ({"peers": {"wanted": 2, "hosts": [{"connected": True}]}}, PROBLEM, "1 of 2 peers"),
    "gc blocked": ({"upkeep": {"gc": {"unreadable_count": 1, "unreadable": ["run/b"]}}}, PROBLEM, "deleted nothing"),
    "gc late": ({"upkeep": {"gc": {"ended_ns": int(NOW_S * 1e9) - 9 * DAY_NS}}}, NOTE, "gc last ran 9.0 d ago"),
    "stray folder": ({"misplaced": ["/home/me/tierfs::"]}, PROBLEM, "/home/me/tierfs:: belongs to no store"),
    "leftovers": ({"unused_folders": [{"bytes": 2048}]}, NOTE, "1 folder of shared memory (2 KiB)"),
}


def test_a_healthy_store_has_no_alarm():
    recent = {"upkeep": {"gc": {"ended_ns": int(NOW_S * 1e9), "unreadable_count": 0}, "scrub": {"known_damaged": 0}}}
    assert alarms_in(QUIET | recent | RUNS | {"queue_files": 1, "oldest_age_s": 5.0}, max_age_s=60, now_s=NOW_S) == []


@pytest.mark.parametrize("name", CASES)
def test_each_thing_that_is_wrong_is_an_alarm(name):
    change, severity, text = CASES[name]
    found = alarms_in(QUIET | change, max_age_s=3600, now_s=NOW_S)
    assert [(alarm["severity"], text in alarm["what"]) for alarm in found] == [(severity, True)], found
    words = found[0]["command"].split()
    assert words[0] == "tierfs"
    assert words[1] in COMMANDS


def test_problems_come_before_notes():
    both = QUIET | CASES["lost"][0] | CASES["conflict"][0] | CASES["leftovers"][0]
    assert [alarm["severity"] for alarm in alarms_in(both, max_age_s=1, now_s=NOW_S)] == [PROBLEM, NOTE, NOTE]
