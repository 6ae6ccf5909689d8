"""The tutorials work as written: their commands run one after the other in a new directory."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorial"
TUTORIAL = TUTORIALS / "first-store.md"
PATIENCE_S = 120


def test_every_command_of_the_tutorial_does_what_it_says(tmp_path):
    text = (
        TUTORIAL.read_text()
        .replace("/tmp/first", str(tmp_path / "first"))
        .replace("/tmp/hello", str(tmp_path / "hello"))
    )
    blocks = re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)
    assert "pip install" in blocks[0][1]  # already done in the environment of this test
    outputs = []
    for language, block in blocks[1:]:
        if language == "python":
            (tmp_path / "save.py").write_text(block)
            continue
        script = f"set -e -o pipefail\n{block}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or "exit code $?" in block, f"{block}\n{done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    everything = "\n".join(outputs)
    assert "hello" in everything
    assert "step_2/.metadata" in everything
    assert "corruption" in outputs[-2]
    assert "removed " in outputs[-1]


def test_the_tutorial_of_ranks_goes_on_with_another_number(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    text = (TUTORIALS / "train-and-resume.md").read_text().replace("/tmp/ranks", str(tmp_path / "ranks"))
    blocks = re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)
    (program,) = [block for language, block in blocks if language == "python"]
    (tmp_path / "train.py").write_text(program)
    first, second, listing, cleaning = [block for language, block in blocks if language == "bash"]

    with begun(tmp_path, first) as training:
        wait_for_line(training, "step 60")
        os.killpg(training.pid, signal.SIGKILL)
    with begun(tmp_path, second) as training:
        resumed = wait_for_line(training, "resumed from step")
        assert int(re.search(r"from step (\d+), read from (ram|nvme|object)", resumed)[1]) >= 20
        assert "2 ranks saved it, but 1 restored it" in wait_for_line(training, "random generators")
        wait_for_line(training, "saved, blocked for")
        os.kill(training.pid, signal.SIGTERM)
        training.communicate(timeout=PATIENCE_S)
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{listing}\n{cleaning}"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "complete" in done.stdout


def test_the_tutorial_of_a_kill_resumes_from_a_complete_step(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    text = (TUTORIALS / "kill-and-resume.md").read_text().replace("/tmp/ckpt", str(tmp_path / "ckpt"))
    blocks = re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)
    (program,) = [block for language, block in blocks if language == "python"]
    (tmp_path / "train.py").write_text(program)
    first, second, listing, cleaning = [block for language, block in blocks if language == "bash"]
    budgets, first = first.split("\n", 1)

    with begun(tmp_path, first, budgets) as training:
        said = wait_for_line(training, "to kill this process: kill -9")
        wait_for_line(training, "step 30:")
        os.kill(int(said.split()[-1]), signal.SIGKILL)
    with begun(tmp_path, second, budgets) as training:
        assert int(re.search(r"from step (\d+)", wait_for_line(training, "resumed from step"))[1]) in {20, 30}
        wait_for_line(training, "step 40:")
        os.killpg(training.pid, signal.SIGKILL)
    script = f"set -e\n{budgets}\n{listing}\n{cleaning}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "complete" in done.stdout


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("upkeep", ["deleted  1", "would go  2", "all sound", "would be removed  ", "\nremoved  "]),
        ("damage", ["1 damaged\nexit code 6", "1 mended", "nothing is lost"]),
        ("conflicts", ["conflicts: another writer", "their change", "our change", "discarded 1"]),
    ],
)
def test_a_page_makes_the_store_that_it_uses(tmp_path, page, said):
    pytest.importorskip("torch", reason="torch is not installed")
    text = (TUTORIALS.parent / "how-to" / f"{page}.md").read_text().replace("/tmp/keep", str(tmp_path / "keep"))
    script = "set -e -o pipefail\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(words in done.stdout for words in said), done.stdout


def environment(directory):
    state = str(directory / "state")  # `tierfs forget --gone` looks at all stores of a state directory
    return {**os.environ, "TIERFS_STATE_DIR": state, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}


def begun(directory, command, before=""):
    return subprocess.Popen(
        ["bash", "-c", f"{before}\nexec {command.strip()}"],
        cwd=directory,
        env={**environment(directory), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_line(training, begin):
    ends_s = time.monotonic() + PATIENCE_S
    lines = []
    for line in training.stdout:
        lines.append(line)
        if begin in line:
            return line
        assert time.monotonic() < ends_s, lines
    raise AssertionError(f"it ended without {begin!r}: {''.join(lines)}")
