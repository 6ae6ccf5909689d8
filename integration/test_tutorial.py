"""The tutorial works as it is written: its commands are run one after the other, in a directory of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial" / "first-store.md"


def test_every_command_of_the_tutorial_does_what_it_says(tmp_path):
    text = (
        TUTORIAL.read_text()
        .replace("/tmp/first", str(tmp_path / "first"))
        .replace("/tmp/hello", str(tmp_path / "hello"))
    )
    blocks = re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)
    assert "pip install" in blocks[0][1]  # what the environment of this test has done already
    outputs = []
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    for language, block in blocks[1:]:
        if language == "python":
            (tmp_path / "save.py").write_text(block)
            continue
        script = f"set -e -o pipefail\n{block}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or "exit code $?" in block, f"{block}\n{done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    everything = "\n".join(outputs)
    assert "hello" in everything
    assert "step_2/.metadata" in everything
    assert "corruption" in outputs[-1]
