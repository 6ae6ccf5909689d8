"""`tierfs doctor` names each thing that a machine lacks, and a remedy."""

import json
import resource
from pathlib import Path

import pytest

import tierfs
from tierfs.cli import main
from tierfs.cli.commands import doctor as checks


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
    ("make", "found"), [(lambda path: path.mkdir(mode=0o755), "chmod 700"), (Path.touch, "is not")]
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
    assert checks.check_kernels("not built: no compiler").state == "note"


def test_huge_pages_need_a_kernel_that_gives_them(tmp_path):
    (tmp_path / "enabled").write_text("always within_size advise [never] deny force\n")
    assert checks.check_huge_pages(tmp_path / "enabled", "6.18.4-x").state == "ok"
    assert checks.check_huge_pages(tmp_path / "enabled", "5.10.0").state == "note"
    (tmp_path / "enabled").write_text("always never [deny] force\n")
    assert checks.check_huge_pages(tmp_path / "enabled", "6.18.4-x").state == "note"


def test_a_mount_needs_a_device_and_a_helper(tmp_path):
    device = tmp_path / "fuse"
    assert checks.check_fuse(device, is_root=True, helper=None).state == "note"
    device.touch()
    assert checks.check_fuse(device, is_root=False, helper=None).state == "note"
    assert checks.check_fuse(device, is_root=True, helper=None).state == "ok"


def test_credentials_are_named_and_never_shown(tmp_path):
    cloud = checks.CLOUDS["S3"]
    found = checks.check_cloud("S3", cloud, {"AWS_ACCESS_KEY_ID": "secret"}, tmp_path, has_client=True)
    assert (found.state, found.found) == ("ok", "s3fs; credentials: AWS_ACCESS_KEY_ID")
    assert checks.check_cloud("S3", cloud, {}, tmp_path, has_client=True).state == "note"
    assert checks.check_cloud("S3", cloud, {}, tmp_path, has_client=False).state == "ok"
