"""A training that is killed again and again, at any moment, ends as one that never was, and loses a step a kill at most."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tierfs

STEPS = 60
KILLS = 8
LIFE = """
import json, sys, torch
sys.path.insert(0, {tests!r})
from support.replay_cases import Training
from tierfs.train import Every, Manager, Replay
torch.set_num_threads(1)
url, log = sys.argv[1:]
training = Training("adamw", "foreach", ("clipping", "scaler", "schedule"))
with Manager(url, save=[Every(steps=17), Replay(ring="8MiB", prove_every=5)], ram="96MiB", nvme="0") as run:
    restored = run.restore(training.state)
    assert restored is None or (restored.is_exact and not restored.stopped), restored
    with open(log, "a") as losses:
        for step in range(restored.step + 1 if restored else 0, {steps}):
            loss = training.step(step)
            losses.write(json.dumps([step, loss]) + "\\n")
            losses.flush()
            run.step(step, training.state)
            if step == 0:
                run.wait()  # before the first full save is complete, nothing is there to begin from
            losses.write(json.dumps([step]) + "\\n")
            losses.flush()
    print(hash(str(training.content())))
"""


def live(url, log, **arguments):
    tests = str(Path(__file__).parents[2] / "tests")
    program = LIFE.format(tests=tests, steps=STEPS)
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.Popen([sys.executable, "-c", program, url, str(log)], env=environment, **arguments)


@pytest.mark.timeout(600)
def test_a_training_killed_at_any_moment_loses_one_step_at_most(tmp_path, monkeypatch):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    tierfs.init(f"file://{tmp_path}/store")
    straight = live(f"tierfs::file://{tmp_path}/store/straight", tmp_path / "straight", stdout=subprocess.PIPE)
    content = straight.communicate()[0]
    assert straight.returncode == 0
    url, log = f"tierfs::file://{tmp_path}/store/run", tmp_path / "log"
    log.touch()
    for _ in range(KILLS):
        before = log.stat().st_size
        process = live(url, log)
        while log.stat().st_size == before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = live(url, log, stdout=subprocess.PIPE)
    assert last.communicate()[0] == content
    expected = dict(line for line in map(json.loads, (tmp_path / "straight").read_text().splitlines()) if len(line) > 1)
    done = -1
    for line in map(json.loads, log.read_text().splitlines()):
        if len(line) > 1:
            assert expected[line[0]] == line[1]
            assert line[0] > done, "a step whose end was reported was made again"
        else:
            done = line[0]
