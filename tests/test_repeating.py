"""A failed draw says its values, its seed, and the one command that repeats it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import pytest
pytest.register_assert_rewrite("support")
from support import repeating

def pytest_configure(config):
    repeating.draw_seed(config)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    repeating.add_command(item, report)
    return report
"""
TESTS = """
import os
from hypothesis import given, settings, strategies
from support.pairs import pairs, run_each

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))

def test_pairs():
    def run(draw):
        assert draw["door"] == "fs" or draw["level"] != "peer"
    run_each(pairs({"door": ["fs", "cli"], "level": ["local", "peer"]}, SEED), run, SEED)

@settings(database=None)
@given(strategies.integers(0, 1 << 60))
def test_numbers(number):
    print("drawn", number)
    assert number < 1 << 40
"""


def test_a_failed_draw_is_repeated_by_the_command_that_it_prints(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_draws.py").write_text(TESTS)
    paths = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TIERFS_TEST")}
    environment |= {"PYTHONPATH": paths, "TIERFS_TEST_SEED": "5"}

    def failed(*words, **environment):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    output = failed("test_draws.py", **environment)
    assert re.search(r"draw \d of TIERFS_TEST_SEED=5, \{'door': 'cli', 'level': 'peer'\}", output)
    commands = re.findall(r"^TIERFS_TEST.*$", output, re.MULTILINE)
    assert [re.search(r"::(\w+)", each)[1] for each in commands] == ["test_pairs", "test_numbers"]
    seed, program, *words = shlex.split(commands[1])
    assert (seed, program) == ("TIERFS_TEST_SEED=5", ".venv/bin/python")
    again = failed(*words[2:], **environment)
    assert re.findall(r"^drawn .*$", again, re.MULTILINE) == re.findall(r"^drawn .*$", output, re.MULTILINE)
