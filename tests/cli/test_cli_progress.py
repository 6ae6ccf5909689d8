"""Progress on stderr, on a terminal and in a file."""

import io
import logging
import re
import sys

import pytest
from support.waiting import until

import tierfs
from tierfs.cli import main
from tierfs.cli.terminal import progress as module
from tierfs.cli.terminal.output import logging_to_stderr
from tierfs.cli.terminal.progress import Progress

MIB = 1024 * 1024


class Terminal(io.StringIO):
    """A terminal that is as wide as COLUMNS."""

    encoding = "utf-8"

    def isatty(self):
        return True


def on_terminal(monkeypatch, shown, first_s=0.05):
    # Not a fixture: pytest replaces stderr again before it calls the test.
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(module, "FIRST_S", first_s)
    monkeypatch.setattr(module, "TERMINAL_S", 0.01)
    return shown


def screen(text):
    """Return the lines that a terminal shows after this output, without colours."""
    lines, at = [""], 0
    for control, count, kind, plain in re.findall(r"(\x1b\[\??(\d*)[\d;]*([a-zA-Z])|\r)|([^\x1b\r]+)", text):
        if kind == "A":
            at -= int(count)
        elif kind == "K" or control == "\r":
            lines[at] = ""  # rich clears the line after each carriage return
        for number, part in enumerate(plain.split("\n")):
            at += bool(number)
            lines += [""] * (at + 1 - len(lines))
            lines[at] += part
    return [line.rstrip() for line in lines]


def test_a_terminal_shows_bytes_rate_and_time_left(monkeypatch):
    terminal = on_terminal(monkeypatch, Terminal())
    with Progress("cp", total_bytes=100 * MIB) as progress:
        progress.advance(40 * MIB)
        until(lambda: "left" in terminal.getvalue())
        going = screen(terminal.getvalue())[-1]
        progress.advance(60 * MIB)
    assert re.fullmatch(r"━{8}╺?━* cp: 40%, 40 MiB/100 MiB, \S+ [KMG]iB/s, \d+:\d\d:\d\d left", going)
    done, rest = screen(terminal.getvalue())
    assert re.fullmatch(r"cp: 100%, 100 MiB/100 MiB, \S+ [KMG]iB/s, 0:00:0\d", done)
    assert rest == ""


def test_a_fast_command_shows_nothing_on_a_terminal(monkeypatch):
    for first_s, wanted in ((60.0, None), (0.0, False)):
        terminal = on_terminal(monkeypatch, Terminal(), first_s)
        with Progress("cp", total_bytes=MIB, wanted=wanted) as progress:
            progress.advance(MIB)
        assert terminal.getvalue() == ""


def test_a_line_without_numbers_is_gone_in_the_end(monkeypatch):
    terminal = on_terminal(monkeypatch, Terminal())
    with Progress("du"):
        until(lambda: "du: 0:00:0" in terminal.getvalue())
    assert set(screen(terminal.getvalue())) == {""}


def test_a_log_line_stands_above_the_progress(monkeypatch):
    terminal = on_terminal(monkeypatch, Terminal())
    with logging_to_stderr(), Progress("verify") as progress:
        progress.advance(MIB)
        until(lambda: "1 MiB" in terminal.getvalue())
        logging.getLogger("tierfs.objects").warning("[red] again" * 20)
    warning, done, _ = screen(terminal.getvalue())
    assert warning == "tierfs: warning: " + "[red] again" * 20
    assert done.startswith("verify: 1 MiB, ")


@pytest.mark.parametrize("kind", ["file", "dumb terminal"])
def test_whole_lines_go_where_nothing_can_be_overwritten(kind, monkeypatch):
    terminal = on_terminal(monkeypatch, Terminal())
    if kind == "file":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with Progress("gc", wanted=True) as progress:
        progress.note("12 records")
    text = terminal.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    assert re.fullmatch(r"gc: 0:00:0\d, 12 records", text.splitlines()[-1])


def test_a_long_rm_says_how_many_are_done(monkeypatch, tmp_path):
    tierfs.init(str(tmp_path / "store"))
    (tmp_path / "file").write_bytes(b"x")
    url = f"tierfs::file://{tmp_path}/store"
    names = [f"{url}/{number}" for number in range(3)]
    assert all(main(["cp", str(tmp_path / "file"), name]) == 0 for name in names)
    terminal = on_terminal(monkeypatch, Terminal(), 0.0)
    assert main(["rm", *names]) == 0
    assert re.fullmatch(r"rm: 0:00:0\d, 3 of 3", screen(terminal.getvalue())[-2])
