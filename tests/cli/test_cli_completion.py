"""The scripts of `tierfs completion` complete commands, actions and options."""

import shutil
import subprocess

import pytest

from tierfs.cli import app, main


@pytest.fixture(scope="module")
def script():
    import contextlib
    import io

    def of(shell):
        with contextlib.redirect_stdout(io.StringIO()) as told:
            assert main(["completion", shell]) == 0
        return told.getvalue()

    return of


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        ("tierfs ch", "checkpoint", "ls"),
        ("tierfs checkpoint d", "diff", "--rank"),
        ("tierfs checkpoint diff --", "--rank", "--limit"),
        ("tierfs ls --", "--recursive", "--rank"),
    ],
)
def test_bash_completes(script, words, there, not_there):
    ask = f'{script("bash")}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tierfs; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    offered = done.stdout.split()
    assert there in offered
    assert not_there not in offered
    assert done.stderr == ""


def test_zsh_and_fish_know_every_command(script, tmp_path):
    for shell in ("zsh", "fish"):
        text = script(shell)
        assert all(f" {name}" in text or f'"{name}' in text for name in app.COMMANDS)
        if shutil.which(shell):
            (tmp_path / shell).write_text(text)
            subprocess.run([shell, "-n", str(tmp_path / shell)], check=True)
