"""Tables: coloured and never cut on a terminal, plain text elsewhere."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

import tierfs
from tierfs.cli import main
from tierfs.cli.terminal.output import align
from tierfs.store import save

LONG = "a name that is wider than the terminal/" * 3 + "日本 [red]"
GREEN, YELLOW, BOLD = "\x1b[32m", "\x1b[33m", "\x1b[1m"


def on_terminal(*words, **environment):
    """Return the output of a command on a terminal of 40 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 40, 0, 0))
    inherited = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-m", "tierfs.cli", *words]
    with subprocess.Popen(command, stdout=theirs, env=inherited | {"TERM": "xterm"} | environment) as process:
        os.close(theirs)
        printed = b""
        try:
            while got := os.read(ours, 1 << 16):
                printed += got
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    assert process.returncode == 0
    return printed.decode().replace("\r\n", "\n")


@pytest.fixture
def url(tmp_path):
    store = tierfs.init(str(tmp_path / "store"))
    save(store, f"run/{LONG}", b"x" * 3000)
    save(store, "run/b", b"")
    return f"tierfs::file://{tmp_path}/store/run"


def test_a_table_on_a_terminal_has_whole_paths_and_what_a_pipe_gets(url, capsys):
    assert main(["ls", "-lR", url]) == 0
    plain = capsys.readouterr().out
    assert LONG in plain
    assert on_terminal("ls", "-lR", url) == plain


def test_the_states_in_a_table_have_colours_on_a_terminal(capsys):
    shown = on_terminal("doctor")
    assert f"{GREEN}ok\x1b[0m" in shown
    assert main(["doctor"]) == 0
    assert re.sub(r"\x1b\[\d*m", "", shown).splitlines()[0] == capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours_gets_plain_text(environment):
    shown = on_terminal("doctor", **environment)
    assert "\x1b" not in shown
    assert re.match(r"(ok|note) +versions ", shown)


ROWS = [
    ("level", "size", "name"),
    ("object", "3 MiB", "object"),
    ("staged", "12 MiB", "日本 [red]:smile: "),
    ("?", "", ""),
]


def test_a_head_is_bold_and_numbers_are_right_aligned(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert align(ROWS, right=(1,), has_head=True, states=(0,)) == [
        f"{BOLD}level\x1b[0m     {BOLD}size\x1b[0m  {BOLD}name\x1b[0m",
        f"{GREEN}object\x1b[0m   3 MiB  object",
        f"{YELLOW}staged\x1b[0m  12 MiB  日本 [red]:smile:",
        "?",
    ]


def test_a_pipe_gets_aligned_columns():
    assert align(ROWS, right=(1,), has_head=True, states=(0,)) == [
        "level     size  name",
        "object   3 MiB  object",
        "staged  12 MiB  日本 [red]:smile:",
        "?",
    ]
