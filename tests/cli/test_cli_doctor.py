"""`tierfs doctor` names each thing that a machine lacks, and a remedy."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.opened import needs_fuse

import tierfs
from tierfs.cli import main
from tierfs.cli.commands import doctor as checks
from tierfs.store import save


def test_it_prints_every_check_and_exits_with_0_where_tierfs_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_CONFIG", str(tmp_path / "none.toml"))
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    names = [check["name"] for check in told["checks"]]
    assert {"versions", "shared memory", "state directory", "open files", "mount", "GPU", "S3"} <= set(names)
    assert all(check["advice"] for check in told["checks"] if check["state"] != "ok" and check["name"] != "S3")
    assert not (tmp_path / "state").exists()


def test_a_problem_exits_with_1_and_says_what_to_change(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIERFS_STATE_DIR", "relative")
    (tmp_path / "config.toml").write_text("[tier]\n")
    monkeypatch.setenv("TIERFS_CONFIG", str(tmp_path / "config.toml"))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "unknown table 'tier'" in shown
    assert "-> set TIERFS_STATE_DIR to a directory on a local disk" in shown


@pytest.mark.parametrize(
    ("make", "found"), [(lambda path: path.mkdir(mode=0o755), "chmod 700"), (Path.touch, "File exists")]
)
def test_an_unusable_state_directory_is_a_problem(tmp_path, monkeypatch, capsys, make, found):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    make(tmp_path / "state")
    assert main(["doctor", "--json"]) == 1
    (check,) = [each for each in json.loads(capsys.readouterr().out)["checks"] if each["name"] == "state directory"]
    assert check["state"] == "problem"
    assert found in check["found"]


def problems(capsys):
    assert main(["doctor", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    return {each["name"]: each["found"] for each in checks if each["state"] == "problem"}


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("TIERFS_RAM", "much", "shared memory"),
        ("TIERFS_NVME", "10", "configuration"),
        ("TIERFS_SHM_DIR", "relative", "shared memory"),
    ],
)
def test_a_wrong_setting_is_a_problem(monkeypatch, capsys, name, value, check):
    monkeypatch.setenv(name, value)
    assert value in problems(capsys)[check]


def test_the_configured_state_directory_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TIERFS_STATE_DIR")
    (tmp_path / "file").touch()
    (tmp_path / "config.toml").write_text(f"[tiers]\nstate_dir = '{tmp_path}/file'\n")
    monkeypatch.setenv("TIERFS_CONFIG", str(tmp_path / "config.toml"))
    assert f"{tmp_path}/file" in problems(capsys)["state directory"]


def test_a_configuration_that_is_no_text_is_a_problem(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").write_bytes(b"\xeb")
    monkeypatch.setenv("TIERFS_CONFIG", str(tmp_path / "config.toml"))
    assert "cannot be read" in problems(capsys)["configuration"]


def test_an_endpoint_is_tested_too(tmp_path, capsys):
    tierfs.init(str(tmp_path / "store"))
    main(["doctor", str(tmp_path / "store"), "--json"])
    endpoint = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (endpoint["name"], endpoint["state"]) == ("endpoint", "ok")
    assert main(["doctor", str(tmp_path / "nothing"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checks"][-1]["state"] == "problem"


def test_small_shared_memory_is_noted(tmp_path):
    memory = 100 * checks.shutil.disk_usage(tmp_path).total
    assert checks.check_shared_memory(tmp_path, memory).state == "note"
    assert checks.check_shared_memory(tmp_path / "none", memory).state == "note"


@pytest.mark.parametrize(("soft", "state"), [(1024, "note"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_descriptors_are_noted(soft, state):
    assert checks.check_descriptors(soft, 1 << 20).state == state


def test_kernels_that_were_not_built_are_noted():
    assert checks.check_kernels("compiled").state == "ok"
    assert checks.check_kernels("NumPy (not built: no compiler)").state == "note"


def test_huge_pages_need_a_kernel_that_gives_them(tmp_path):
    (tmp_path / "enabled").write_text("always within_size advise [never] deny force\n")
    assert checks.check_huge_pages(tmp_path / "enabled", "6.18.4-x").state == "ok"
    assert checks.check_huge_pages(tmp_path / "enabled", "5.10.0").state == "note"
    (tmp_path / "enabled").write_text("always never [deny] force\n")
    assert checks.check_huge_pages(tmp_path / "enabled", "6.18.4-x").state == "note"


@pytest.fixture
def confined(tmp_path):
    """Return a function that runs a command of tierfs in a place of its own, and returns exit code, stdout and stderr.

    The place is a namespace of users and mounts, in which a script ends with the command, as root or as a user without a
    name or rights. The home is an empty directory.
    """
    (tmp_path / "home").mkdir()

    def run(script, *words, uid=0, **variables):
        user = ["--map-root-user"] if uid == 0 else [f"--map-user={uid}"]
        apart = ["unshare", "--user", *user, "--mount"]
        if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False).returncode:
            pytest.skip("this user may not make namespaces")
        environment = {**os.environ, "HOME": str(tmp_path / "home"), **variables}
        done = subprocess.run(
            [*apart, "sh", "-c", f'{script} "$@"', "sh", sys.executable, "-m", "tierfs.cli", *map(str, words)],
            env={name: value for name, value in environment.items() if value},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("mount --bind /dev/null /dev/fuse && exec", "/dev/fuse is something else than the device of FUSE"),
        ("exec setpriv --bounding-set -sys_admin --inh-caps -sys_admin", "cannot mount|may not mount"),
    ],
    ids=["another device", "no right"],
)
@needs_fuse
def test_a_mount_that_fails_is_not_called_ok(confined, tmp_path, url, script, words):
    _, out, _ = confined(script, "doctor", "--json")
    (check,) = [each for each in json.loads(out)["checks"] if each["name"] == "mount"]
    assert check["state"] == "note"
    assert re.search(words, check["found"])
    assert not list(Path(tempfile.gettempdir()).glob("tierfs-doctor-*"))
    (tmp_path / "mnt").mkdir()
    code, _, said = confined(script, "mount", url, tmp_path / "mnt")
    assert code
    assert re.search(words, said)


def test_shared_memory_that_cannot_be_written_is_noted(confined, tmp_path):
    _, out, _ = confined('mount -t tmpfs -o ro none "$HOME" && exec', "doctor", TIERFS_SHM_DIR=f"{tmp_path}/home")
    assert f"{tmp_path}/home is not writable: segments go to the disk" in out


# Each: a script, and the user that it is run as.
HOMES = {
    "read-only": ('mount -t tmpfs -o ro none "$HOME" && exec', 0),
    "closed": ('chmod 0 "$HOME" && exec', 12345),
    "none": ("exec env -u HOME", 12345),
}


@pytest.mark.parametrize("home", HOMES)
def test_a_home_that_cannot_hold_state_is_a_problem(confined, home):
    script, uid = HOMES[home]
    code, out, said = confined(script, "doctor", "--json", uid=uid, TIERFS_STATE_DIR="")
    assert (code, "Traceback" in said) == (1, False), said
    (check,) = [each for each in json.loads(out)["checks"] if each["name"] == "state directory"]
    assert (check["state"], check["advice"]) == ("problem", "set TIERFS_STATE_DIR to a directory on a local disk")


READS = [("ls",), ("stat",), ("status",), ("checkpoint", "ls"), ("verify",), ("cat",)]


@pytest.mark.parametrize("words", READS, ids=" ".join)
@pytest.mark.parametrize("home", ["read-only", "closed"])
def test_reading_goes_on_without_a_state_directory(confined, url, store, home, words):
    save(store, "run/a", b"content")
    script, uid = HOMES[home]
    place = f"{url}/run/a" if words == ("cat",) else f"{url}/run"
    code, _, said = confined(script, *words, place, uid=uid, TIERFS_STATE_DIR="", TIERFS_RAM="64MiB")
    assert (code, "Traceback" in said) == (0, False), said
    assert "set TIERFS_STATE_DIR" in said or words == ("verify",)  # that uses no local tiers


@pytest.mark.parametrize("home", HOMES)
def test_writing_without_a_state_directory_names_it(confined, url, tmp_path, home):
    script, uid = HOMES[home]
    (tmp_path / "a").write_bytes(b"content")
    code, _, said = confined(script, "cp", tmp_path / "a", f"{url}/a", uid=uid, TIERFS_STATE_DIR="", TIERFS_RAM="64MiB")
    assert code in {2, 10}
    assert "set TIERFS_STATE_DIR to a directory" in said


def test_credentials_are_named_and_never_shown(tmp_path):
    cloud = checks.CLOUDS["S3"]
    found = checks.check_cloud("S3", cloud, {"AWS_ACCESS_KEY_ID": "secret"}, tmp_path, has_client=True)
    assert (found.state, found.found) == ("ok", "s3fs; credentials: AWS_ACCESS_KEY_ID")
    assert checks.check_cloud("S3", cloud, {}, tmp_path, has_client=True).state == "note"
    assert checks.check_cloud("S3", cloud, {}, tmp_path, has_client=False).state == "ok"
