"""``tierfs demo``: its ranks, its report, and each way in which it can fail.

`integration/test_clouds.py` has the whole run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from support.waiting import HANG_S, until

from tierfs.cli.app import build_parser
from tierfs.cli.commands import demo
from tierfs.demo.report import CompletedSave, Proof, Report, compare_losses
from tierfs.demo.story import Demo, DemoRun, RankGroup
from tierfs.errors import AlreadyExistsError, InvalidInputError, ReadOnlyError, TierfsError
from tierfs.host.local_state import local_stores
from tierfs.session import init
from tierfs.store import save

ROOT = Path(__file__).parents[2]
START_RANKS_AND_WAIT = """
import sys, time
from tierfs.demo.story import RankGroup
options = ["--url", sys.argv[1], "--steps", "100000", "--every", "100000", "--params", "200000"]
with RankGroup("run", options, world_size=2, timeout_s=200) as ranks:
    print("started", flush=True)
    time.sleep(60)
"""

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def parsed(*arguments: str) -> argparse.Namespace:
    return build_parser("demo").parse_args(arguments)


def report(*, uninterrupted: dict[int, str], resumed: dict[int, str], digests: tuple[str, str] = ("d", "d")) -> Report:
    return Report(
        url="tierfs::file:///somewhere",
        parameters=1000,
        killed_at=4,
        resumed_from=2,
        terminated_at=3,
        proofs=[],
        rows=compare_losses(uninterrupted, resumed, last=4),
        digests=digests,
        checkpoints=[
            CompletedSave("straight/step_2", 4096, 0.25, "object"),
            CompletedSave("resumed/step_2", 4096, 0.5, "object"),
        ],
        stored_bytes={"straight": 2048, "resumed": 0},
        training_s=10.0,
    )


LOSSES = {step: (1 / step).hex() for step in (1, 2, 3, 4)}
NEXT_AFTER = {**LOSSES, 4: (0.25 + 2**-54).hex()}


@needs_torch
def test_a_signal_at_the_last_step_ends_the_run_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    init(f"file://{tmp_path}/demo")
    options = ["--url", f"tierfs::file://{tmp_path}/demo/run", "--steps", "6", "--every", "2", "--params", "200000"]
    terminated, resumed = DemoRun(), DemoRun()
    for told, more, ends_with in ((terminated, ["--terminate", "6"], 128 + signal.SIGTERM), (resumed, [], 0)):
        with RankGroup("run", [*options, *more], world_size=1, timeout_s=HANG_S, ends_with=ends_with) as ranks:
            for event in ranks.events():
                told.take(event)
    assert terminated.stopped_at == 6
    assert sorted(terminated.losses) == [1, 2, 3, 4, 5, 6]
    assert (resumed.begun_at, resumed.losses) == (6, {})
    assert resumed.digest


def test_equal_losses_and_states_are_equal() -> None:
    found = report(uninterrupted=LOSSES, resumed=LOSSES)
    assert found.equal
    assert "EQUAL: all 2 losses" in found.as_text()
    assert "resumed: 1 checkpoint " in found.as_text()
    assert found.as_text().splitlines()[-2] == "Saving took 7.5% of its time; 2 checkpoints take 2 KiB, not 8 KiB."


def test_a_loss_that_differs_in_its_last_bit_is_different() -> None:
    found = report(uninterrupted=LOSSES, resumed=NEXT_AFTER)
    assert not found.equal
    assert "DIFFERENT: 1 of 2 losses differ, first at step 4" in found.as_text()
    assert "this is a bug" in found.as_text().splitlines()[-1]
    assert [row["equal"] for row in found.as_document()["losses"]] == [True, True, True, False]


def test_a_step_that_a_run_never_made_is_different() -> None:
    shorter = {step: loss for step, loss in LOSSES.items() if step < 4}
    assert not report(uninterrupted=LOSSES, resumed=shorter).equal
    assert not report(uninterrupted=shorter, resumed=shorter).equal


def test_equal_losses_with_another_final_state_are_different() -> None:
    found = report(uninterrupted=LOSSES, resumed=LOSSES, digests=("d", "e"))
    assert not found.equal
    assert "the final state is not" in found.as_text()


def test_a_resume_that_is_not_proven_is_no_equality() -> None:
    found = report(uninterrupted=LOSSES, resumed=LOSSES)
    proofs = [Proof(2, proven=True, replayed=3, text=""), Proof(3, proven=False, replayed=1, text="losses: different")]
    assert replace(found, proofs=proofs[:1]).equal
    assert "PROVEN at step 2" in replace(found, proofs=proofs[:1]).as_text()
    unproven = replace(found, proofs=proofs)
    assert not unproven.equal
    assert "the resume at step 3 is not proven\nlosses: different" in unproven.as_text()


def test_an_empty_comparison_is_not_equal() -> None:
    assert not replace(report(uninterrupted=LOSSES, resumed=LOSSES), rows=[]).equal


@needs_torch
@pytest.mark.parametrize(("resumed", "code"), [(LOSSES, 0), (NEXT_AFTER, 1)])
def test_the_exit_code_follows_the_equality(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], resumed: dict[int, str], code: int
) -> None:
    monkeypatch.setattr(Demo, "play", lambda self: report(uninterrupted=LOSSES, resumed=resumed))
    assert demo.run(parsed("--json")) == code
    assert json.loads(capsys.readouterr().out)["equal"] is (code == 0)


@needs_torch
def test_the_temporary_store_leaves_nothing_on_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = []

    class SmallDemo:  # saves one file, which takes no minute
        def __init__(self, url: str, _plan: object) -> None:
            self.url = url

        def play(self) -> Report:
            init(self.url)
            filesystem, path = fsspec.url_to_fs(f"{self.url}/file")
            filesystem.pipe(path, b"x" * 100_000)
            filesystem.wait(path, "object", timeout=60)
            kept.extend(local_stores(tmp_path / "state"))
            return report(uninterrupted=LOSSES, resumed=LOSSES)

    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(demo, "Demo", SmallDemo)
    assert demo.run(parsed("--json")) == 0
    assert len(kept) == 1
    assert local_stores(tmp_path / "state") == []


def test_missing_torch_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'tierfs\[torch\]'"):
        demo.run(parsed())


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "tierfs::/data"), "is not a tierfs URL"),
        (("--url", "tierfs::memory://demo"), "in one process only"),
        (("--params", "lots"), "is not a size"),
        (("--params", "10"), "--params must be between"),
        (("--every", "0"), "--every must be at least 1"),
        (("--steps", "5", "--every", "3"), "--steps must be at least twice --every, 6"),
        (("--timeout", "nan"), "--timeout nan: give a number of seconds over 0"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        demo.run(parsed(*arguments))


@needs_torch
def test_a_state_directory_open_to_others_stops_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path))
    with pytest.raises(ReadOnlyError, match=f"closed to others: chmod 700 {tmp_path}, or set TIERFS_STATE_DIR"):
        demo.run(parsed("--params", "50000"))


@needs_torch
def test_an_earlier_demo_is_not_written_over(tmp_path: Path) -> None:
    save(init(f"file://{tmp_path}"), "straight/step_6/.metadata", b"")
    with pytest.raises(AlreadyExistsError, match="from an earlier demo"):
        demo.run(parsed("--url", f"tierfs::file://{tmp_path}"))


@needs_torch
def test_a_failing_rank_is_named_with_the_end_of_its_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # No store exists at this URL, so the ranks can neither restore nor save.
    options = ["--url", f"tierfs::file://{tmp_path}/no-store", "--steps", "2", "--every", "2", "--params", "200000"]
    group = RankGroup("short run", options, world_size=1, timeout_s=HANG_S)
    with (
        pytest.raises(
            TierfsError, match=r"(?s)short run failed: rank \d with (exit code 1|signal SIGABRT).*tierfs init"
        ),
        group as ranks,
    ):
        list(ranks.events())


@needs_torch
def test_a_phase_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = ["--url", f"tierfs::file://{tmp_path}", "--steps", "100000", "--every", "100000", "--params", "200000"]
    group = RankGroup("long run", options, world_size=2, timeout_s=0.5)
    with pytest.raises(TierfsError, match=r"the long run did not end within 0\.5 s: raise --timeout"), group as ranks:
        list(ranks.events())
    assert group.kill() == [-signal.SIGKILL] * 2


@needs_torch
def test_no_rank_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    init(f"file://{tmp_path}")
    launcher = subprocess.Popen(
        [sys.executable, "-c", START_RANKS_AND_WAIT, f"tierfs::file://{tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # the ranks leave files there
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher:
        assert launcher.stdout.readline() == "started\n"
        pids = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        launcher.kill()
    assert len(pids) == 2
    until(lambda: not [pid for pid in pids if is_demo_worker(pid)])


def is_demo_worker(pid: str) -> bool:
    """Whether the process runs and is still a rank of a demo: the pid may be used again."""
    try:
        return b"tierfs.demo.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (ProcessLookupError, FileNotFoundError):
        return False
