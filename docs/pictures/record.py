"""Records a kill and a resume in a terminal, and draws the recording as SVG.

    python docs/pictures/record.py            # draw kill-and-resume.cast again
    python docs/pictures/record.py --record   # run the tutorial's program, kill it, resume it; keep what the terminal shows

The recording is an asciicast (version 2) of a real bash that runs ``train.py`` of docs/tutorial/kill-and-resume.md in a new
directory. The program is killed by SIGKILL a moment after it has printed its third save. In the picture each line appears
at its time, once; where nothing moves (a print, ``prefers-reduced-motion``), all lines are there.
"""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from svg import MARGIN, picture  # noqa: E402 - it lies beside this script

CAST = HERE / "kill-and-resume.cast"
TUTORIAL = HERE.parent / "tutorial" / "kill-and-resume.md"
KILLED_AFTER, ENDED_AFTER = "step 30:", "step 60:"
STORE = "/tmp/ckpt"  # noqa: S108 - of the tutorial
SHM = "/dev/shm"  # noqa: S108 - where the ram tier lies
KILL_DELAY_S = 0.3
PATIENCE_S = 240
FONT, ROW = 11.5, 17
STYLE = """<style>
.ground { fill: #0d1117; stroke: #3d444d } .shell { fill: #e6edf3 } .shell.bad { fill: #ff7b72 } .shell.good { fill: #7ee787 }
.shell.prompt { fill: #9198a1 } .shell { animation: show 1ms both }
@keyframes show { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-reduced-motion: reduce) { .shell { animation: none } }
</style>"""


def record() -> list[tuple[float, str]]:
    """Run the program in a bash, kill it, run it again, and return what the terminal showed, with the seconds."""
    program, budgets = re.search(r"```python\n(.*?)```.*?(export [^\n]*)", TUTORIAL.read_text(), re.DOTALL).groups()
    with (
        tempfile.TemporaryDirectory(prefix="tierfs-record-", ignore_cleanup_errors=True) as directory,
        tempfile.TemporaryDirectory(prefix="tierfs-record-", dir=SHM, ignore_cleanup_errors=True) as segments,
    ):
        Path(directory, "train.py").write_text(program.replace(STORE, f"{directory}/ckpt"))
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PS1": "$ ",
            "TERM": "dumb",
            "TIERFS_STATE_DIR": f"{directory}/state",
            "TIERFS_SHM_DIR": segments,
        }
        shell, screen = pty.fork()
        if shell == 0:
            os.chdir(directory)
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], environment)  # noqa: S606 - it is the shell
        try:
            for line in (budgets, "clear"):
                os.write(screen, f"{line}\n".encode())
            _until(screen, time.monotonic() + 3, [], "nothing that is printed")
            begun, shown = time.monotonic(), [(0.0, "$ ")]

            def run(line: str, until: str) -> None:
                os.write(screen, f"{line}\n".encode())
                _until(screen, begun, shown, until)

            run("python -W ignore train.py", KILLED_AFTER)
            time.sleep(KILL_DELAY_S)
            (child,) = children_of(shell)
            os.kill(child, signal.SIGKILL)
            _until(screen, begun, shown, "$ ")  # it may come together with "Killed"
            run("python -W ignore train.py", ENDED_AFTER)
        finally:
            for process in (*children_of(shell), shell):
                os.kill(process, signal.SIGKILL)
            os.waitpid(shell, 0)
            command = [sys.executable, "-m", "tierfs.cli", "flusher", "stop", f"file://{directory}/ckpt"]
            subprocess.run(command, env=environment, check=False, capture_output=True)  # noqa: S603 - of this script alone
        return shown


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _until(screen: int, begun: float, shown: list[tuple[float, str]], word: str) -> None:
    """Read the screen until a word was on it, or for three seconds if ``begun`` lies in the future."""
    seen = ""
    while word not in seen:
        if time.monotonic() > begun + (PATIENCE_S if shown else 0):
            if shown:
                raise TimeoutError(f"{word!r} was not printed within {PATIENCE_S} s: {seen}")
            return
        if select.select([screen], [], [], 0.1)[0]:
            data = os.read(screen, 65536).decode(errors="replace")
            seen += data
            if shown:
                shown.append((round(time.monotonic() - begun, 3), data))


def lines_of(cast: list[list[Any]]) -> list[tuple[float, str]]:
    """The lines on the screen, each with the seconds at which it began."""
    found, line, since = [], "", 0.0
    for seconds, _, data in cast:
        for piece in re.split(r"(?<=\n)", data):
            since = seconds if not line else since
            line += piece
            if line.endswith("\n"):
                found.append((since, line.rstrip("\r\n")))
                line = ""
    return [(seconds, line) for seconds, line in [*found, (since, line)] if line.strip() and line.strip() != "$"]


def draw() -> str:
    """The recording as SVG."""
    header, *events = (json.loads(line) for line in CAST.read_text().splitlines())
    parts = []
    for number, (seconds, line) in enumerate(lines_of(events)):
        kind = "prompt" if line.startswith("$") else "bad" if "Killed" in line else "good" if "resumed" in line else ""
        parts.append(
            f'<text class="shell {kind}" x="{MARGIN}" y="{MARGIN + 14 + ROW * number}" '
            f'style="animation-delay: {seconds:.2f}s">{escape(line)}</text>'
        )
    parts = [f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}">', *parts, "</g>"]
    height = 2 * MARGIN + ROW * (len(parts) - 2) + 6
    return picture(height, parts, header["title"], extra_style=STYLE)


def alternatives() -> dict[str, str]:
    """The picture in words, by its name. A page that shows it has these words."""
    return {CAST.stem: json.loads(CAST.read_text().split("\n")[0])["title"]}


def pictures() -> dict[Path, str]:
    """Every picture that there is to be, by its file."""
    return {CAST.with_suffix(".svg"): draw()}


if __name__ == "__main__":
    if "--record" in sys.argv:
        recorded = record()
        title = "A terminal: train.py saves while it trains, is killed, and resumes from the newest complete checkpoint"
        header = {"version": 2, "width": 58, "height": 24, "title": title, "command": "record.py --record"}
        rows = [json.dumps(header), *(json.dumps([seconds, "o", data]) for seconds, data in recorded)]
        CAST.write_text("\n".join(rows) + "\n")
    for path, svg in pictures().items():
        path.write_text(svg)
