"""Rules for every command: help, documentation, exit codes, errors, and cheap imports."""

import errno
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs import errors
from tierfs.cli import app as frame
from tierfs.cli import main
from tierfs.cli.terminal.output import colored, describe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text()
CATEGORIES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TierfsError)]


def section(name):
    """Return the section of the reference about one command."""
    return re.split(r"^## ", PAGE.partition(f"\n## tierfs {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", frame.COMMANDS)
def test_every_command_has_help_with_examples(name, capsys):
    command = frame.load_command(name)
    assert "\n" not in command.line
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    for line in command.examples:
        assert f"tierfs {name}" in line
        assert line in shown


@pytest.mark.parametrize("name", frame.COMMANDS)
def test_every_example_in_a_help_text_is_accepted_by_the_parser(name):
    parser = frame.build_parser(name)
    for line in frame.load_command(name).examples:
        words = re.split(r" \||  #| >", line)[0].split()
        parser.parse_intermixed_args(words[2:])


@pytest.mark.parametrize("name", frame.COMMANDS)
def test_every_command_and_every_option_is_in_the_reference(name):
    text = section(name)
    assert f"\ntierfs {name} " in text
    assert f"[{name}](#tierfs-{name})" in PAGE
    parser = frame.build_parser(name)
    for one in getattr(parser, "actions", {"": parser}).values():
        for action in one._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or re.search(rf"(?<!\S)\W?{option}\b", text), option


@pytest.mark.parametrize("name", ["checkpoint", "flusher"])
def test_an_action_has_help_with_its_options_alone(name, capsys):
    for action, parser in frame.build_parser(name).actions.items():
        assert main([name, action, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: tierfs {name} {action} ")
        assert f"tierfs {name} {action} " in shown.partition("examples:")[2]
        assert ("--force" in shown) == ("--force" in parser._option_string_actions)
        assert main([name, "--help", action]) == 0  # options may precede the action
        assert capsys.readouterr().out == shown
    assert main([name]) == 2


def test_a_misspelt_command_is_answered_with_the_right_one(capsys):
    assert main(["chekpoint", "ls"]) == 2
    assert "did you mean checkpoint?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["checkpoint", "--json", "foo"], "'foo' is not an action"),
        (["flusher", "--state-dir", "/tmp", "stpo"], "'stpo' is not an action"),
        (["flusher", "stpo", "x"], "'stpo' is not an action (did you mean stop?)"),
        (["flusher", "--state-dir=/tmp", "stpo"], "'stpo' is not an action"),
        (["checkpoint", "--json"], "name an action"),
        (["checkpoint", "--colour", "red", "ls", "x"], "--colour"),
    ],
)
def test_a_misspelt_action_is_named(words, text, capsys):
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_the_reference_has_no_command_that_is_not_there():
    assert sorted(re.findall(r"^## tierfs (\w+)$", PAGE, flags=re.MULTILINE)) == sorted(frame.COMMANDS)


@pytest.mark.parametrize("kind", CATEGORIES, ids=lambda kind: kind.__name__)
def test_every_category_of_errors_is_in_the_table_of_exit_codes(kind):
    assert re.search(rf"^\| {kind.exit_code} \|.*`{kind.kind}`", PAGE, flags=re.MULTILINE)


@pytest.fixture
def breaks(monkeypatch):
    """Let ``tierfs ls`` raise an error."""

    def ls_raises(error):
        def run(*_, **__):
            raise error

        monkeypatch.setattr("tierfs.cli.commands.listing.store_place", run)

    return ls_raises


@pytest.mark.parametrize("kind", CATEGORIES, ids=lambda kind: kind.__name__)
def test_an_error_ends_in_the_exit_code_of_its_category(kind, breaks, capsys):
    breaks(kind("it broke", path="run/a"))
    assert main(["ls", "x", "--json"]) == kind.exit_code
    shown = capsys.readouterr()
    assert shown.err.startswith("tierfs: it broke")
    error = json.loads(shown.out)["error"]
    assert (error["kind"], error["path"]) == (kind.kind, "run/a")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, errors.NotFoundError),
        (errno.EEXIST, errors.AlreadyExistsError),
        (errno.EACCES, errors.ReadOnlyError),
        (errno.EROFS, errors.ReadOnlyError),
        (errno.ENOSPC, errors.CapacityError),
        (errno.EISDIR, errors.InvalidInputError),
        (errno.ENOTDIR, errors.InvalidInputError),
        (errno.ELOOP, errors.InvalidInputError),
        (errno.EIO, errors.TierfsError),
    ],
)
def test_an_error_of_a_local_file_has_the_category_of_ours(number, kind):
    failure = describe(OSError(number, os.strerror(number), "/there/file"))
    assert (failure.kind, failure.exit_code, failure.path) == (kind.kind, kind.exit_code, "/there/file")
    assert failure.message.startswith(f"/there/file: {os.strerror(number)}")


def test_an_interrupt_exits_with_130(breaks, capsys):
    breaks(KeyboardInterrupt())
    assert main(["ls", "x"]) == 130
    assert capsys.readouterr().err == "tierfs: interrupted\n"


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["ls", "--colour", "x"],
        ["dance"],
        ["--dance"],
        ["cat", "x", "--offset", "-1"],
        ["cat", "x", "--offset", "much"],
        ["cp", "one"],
        ["init", "x", "--digest", "md5"],
    ],
)
def test_wrong_usage_exits_with_2_and_says_where_to_look(words, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "--help` shows examples" in shown.err
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "invalid-input"


@pytest.mark.parametrize(
    ("environment", "is_terminal", "has_color"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False), ({}, False, False)],
)
def test_colours_are_for_terminals_that_want_them(environment, is_terminal, has_color, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    assert ("\x1b" in colored("text", "ok", stream)) == has_color


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["help"], ["--help"]),
        (["help", "cp"], ["cp", "--help"]),
        (["help", "checkpoint", "diff"], ["checkpoint", "diff", "--help"]),
        (["-v"], ["--version"]),
        (["help", "check"], ["verify", "--help"]),
        (["list", "{url}", "-l"], ["ls", "{url}", "-l"]),
        (["check", "{url}"], ["verify", "{url}"]),
        (["checkpoint", "list", "{url}"], ["checkpoint", "ls", "{url}"]),
        (["checkpoint", "--limit", "1", "list", "{url}"], ["checkpoint", "ls", "{url}", "--limit", "1"]),
    ],
)
def test_words_of_other_tools_mean_the_same(url, words, same, capsys):
    shown = []
    for each in (words, same):
        assert main([word.format(url=url) for word in each]) == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert shown[0].out or shown[0].err or "ls" in same


def test_a_suggested_command_can_be_pasted(tmp_path, capsys):
    place = tmp_path / "it's a run"
    assert main(["ls", str(place)]) == 3
    shown = re.search(r"such as: (tierfs init .*)", capsys.readouterr().err)[1]
    assert main(shlex.split(shown)[1:]) == 0
    assert main(["stat", f"{place}/new dir/a"]) == 3
    shown = re.search(r"`(tierfs ls .*?)` lists", capsys.readouterr().err)[1]
    assert shlex.split(shown)[2] == f"tierfs::file://{place}"


def test_the_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\s", shown, flags=re.MULTILINE) for name in frame.COMMANDS)


def test_without_a_command_a_new_host_is_told_where_to_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    assert main([]) == 0
    assert "tierfs init URL" in capsys.readouterr().out
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"state_directory": str(tmp_path / "state"), "stores": []}


@pytest.mark.parametrize(
    ("words", "code", "next_step"),
    [
        (["ls", "{url}/nothing"], 3, "tierfs ls {url}"),
        (["ls", "{url}/nothing", "-R"], 3, "tierfs ls {url}"),
        (["stat", "{url}/nothing"], 3, "tierfs ls {url}"),
        (["du", "{url}/nothing"], 3, "tierfs ls {url}"),
        (["verify", "{url}/nothing"], 3, "tierfs ls {url}"),
        (["cat", "{url}/nothing"], 3, "tierfs ls {url}"),
        (["cat", "{url}"], 2, "tierfs ls"),
        (["cp", "{url}/nothing", "/tmp/x"], 3, "tierfs ls {url}"),
        (["cp", "/nothing/there", "{url}/"], 3, "starts with tierfs::"),
        (["mv", "{url}/nothing", "{url}/x"], 3, "tierfs ls {url}"),
        (["rm", "{url}/nothing"], 3, "tierfs ls {url}"),
        (["ls", "/nothing/there"], 3, "tierfs init"),
        (["ls", "tierfs://nowhere/x"], 2, "[stores.nowhere]"),
        (["ls", "nosuchprotocol://x/y"], 2, "nosuchprotocol"),
        (["ls", ""], 2, "give a URL"),
        (["doctor", ""], 2, "give a URL"),
        (["mount", "", "/tmp"], 2, "give a URL"),
        (["umount", ""], 2, "give a URL"),
        (["rm", "{url}"], 2, "add -r"),
        (["init", "{url}/inside"], 2, "use that one"),
        (["init", "{url}", "--digest", "blake3"], 2, "cannot be changed"),
    ],
)
def test_an_error_names_the_path_and_the_next_step(url, words, code, next_step, capsys, monkeypatch):
    monkeypatch.setenv("TIERFS_CONFIG", "/nothing/config.toml")
    words = [word.format(url=url) for word in words]
    assert main([*words, "--json"] if words[0] != "cat" else words) == code
    shown = capsys.readouterr()
    assert next_step.format(url=url) in shown.err
    assert (
        words[-2 if words[0] == "cp" else 1].removeprefix("tierfs::").removeprefix("tierfs://").removesuffix("/x")
        in shown.err
    )
    if words[0] != "cat":
        assert json.loads(shown.out)["error"]["message"] in shown.err


@pytest.mark.parametrize("words", [["sync", "", "{url}"], ["materialize", "{url}", ""], ["mount", "{url}", ""]])
def test_an_empty_directory_is_refused(url, capsys, words):
    assert main([word.format(url=url) for word in words]) == 2
    assert "an argument is empty" in capsys.readouterr().err


def test_version_says_what_is_installed(capsys):
    assert main(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert list(versions) == ["tierfs", "format", "python", "fsspec", "torch", "kernels"]
    assert versions["fsspec"] == importlib.metadata.version("fsspec")
    assert main(["version"]) == 0
    assert versions["fsspec"] in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tierfs {versions['tierfs']}\n"


def run_program(*words, **more):
    """Run the program in a process, as a shell does."""
    return subprocess.run(
        [sys.executable, "-m", "tierfs.cli", *words], cwd=ROOT, capture_output=True, check=False, **more
    )


def test_the_program_runs_and_hands_its_exit_code_on(tmp_path):
    assert run_program("version").stdout.startswith(b"tierfs ")
    failed = run_program("ls", str(tmp_path), "--json", text=True)
    assert failed.returncode == 3
    assert "Traceback" not in failed.stderr
    assert json.loads(failed.stdout)["error"]["kind"] == "store-not-found"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_closes_the_pipe_ends_the_program_quietly(url, tmp_path, unbuffered):
    (tmp_path / "file").write_bytes(bytes(300_000))
    assert main(["cp", str(tmp_path / "file"), f"{url}/file"]) == 0
    script = f"{sys.executable} -m tierfs.cli cat {url}/file | head -c 1; echo ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=True, env=environment)
    assert done.stdout == b"\x00141\n"
    assert done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux")
def test_a_full_disk_behind_stdout_is_an_error_like_others(url):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tierfs.cli", "stat", url],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 9
    assert b"Traceback" not in done.stderr
    assert b"ignored" not in done.stderr


@pytest.mark.parametrize("words", ["ls --json", "version"])
def test_a_closed_stdout_is_an_error_like_others(url, words):
    script = f"{sys.executable} -m tierfs.cli {words} {url * (words != 'version')} >&-"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        b"tierfs: stdout is closed: redirect it to /dev/null if you do not need it\n",
    )


def test_a_command_works_with_stderr_closed(url):
    script = f"{sys.executable} -m tierfs.cli ls --json {url} 2>&-"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["entries"]) == (0, [])
    script = f"{sys.executable} -m tierfs.cli ls --json {url}/missing 2>&-"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["error"]["kind"]) == (3, "not-found")


def test_a_closed_stdin_is_an_error_like_others(url):
    script = f"{sys.executable} -m tierfs.cli cp - {url}/a <&-"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (2, b"tierfs: stdin is closed: there is nothing to copy\n")
    assert main(["stat", f"{url}/a"]) == 3


def test_stores_in_directories_that_are_gone_are_counted_and_not_listed(tmp_path, monkeypatch, tell, told):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_RAM", "16MiB")
    monkeypatch.setenv("TIERFS_NVME", "0")
    here, gone = tmp_path / "here", tmp_path / "gone"
    (tmp_path / "file").write_bytes(b"x" * 100)
    for root in (here, gone):
        tell("init", root)
        tell("cp", tmp_path / "file", f"tierfs::file://{root}/file")
    tell("flusher", "stop", gone)
    shutil.rmtree(gone)
    shown = tell()
    assert str(here) in shown
    assert str(gone) not in shown
    assert "1 more are gone" in shown
    assert {store["place"]: store["is_gone"] for store in told()["stores"]} == {str(here): False, str(gone): True}


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        ("tierfs ch", "checkpoint", "ls"),
        ("tierfs checkpoint d", "diff", "--rank"),
        ("tierfs checkpoint diff --", "--rank", "--limit"),
        ("tierfs ls --", "--recursive", "--rank"),
    ],
)
def test_bash_completes(tell, words, there, not_there):
    ask = f'{tell("completion", "bash")}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tierfs; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    offered = done.stdout.split()
    assert there in offered
    assert not_there not in offered
    assert done.stderr == ""


def test_zsh_and_fish_know_every_command(tell, tmp_path):
    for shell in ("zsh", "fish"):
        text = tell("completion", shell)
        assert all(f" {name}" in text or f'"{name}' in text for name in frame.COMMANDS)
        if shutil.which(shell):
            (tmp_path / shell).write_text(text)
            subprocess.run([shell, "-n", str(tmp_path / shell)], check=True)


def test_a_command_imports_nothing_heavy():
    code = """
import sys
from tierfs.cli import main
main(["version"])
main(["--help"])
main(["checkpoint", "--help"])
main(["checkpoint", "ls", "x", "--shards"])
light = set(sys.modules)
main(["ls", "/nothing/there"])
heavy = {"torch", "numpy", "rich", "s3fs", "gcsfs", "adlfs", "aiobotocore", "obstore", "cupy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not {"fsspec", "rich", "asyncio", "numpy", "tierfs.store"} & light, light
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
