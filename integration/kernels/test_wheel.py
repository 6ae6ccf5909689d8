"""The wheel: which Pythons it says that it is for, and that each of them takes it and runs its compiled loops."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITED_SINCE = (3, 11)
ASK = "import sys, ensurepip, venv; print(sys.version_info[0], sys.version_info[1])"
# A module of tierfs that needs no dependency.
LOOK = "import tierfs.kernels as kernels; assert kernels.active, kernels.status(); print(kernels.__file__)"


def pythons() -> dict[tuple[int, int], str]:
    """Return a Python of each version from 3.10 on that this machine has and that can make an environment."""
    minors = range(10, 20)
    named = [path for minor in minors if (path := shutil.which(f"python3.{minor}"))]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found: dict[tuple[int, int], str] = {}
    for python in (sys.executable, *map(str, sorted(root.glob("versions/3.1[0-9]*/bin/python"))), *named):
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            major, minor = map(int, asked.stdout.split())
            found.setdefault((major, minor), python)
    return found


PYTHONS = pythons()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of the package, without the build outputs that lie in the clone."""
    target = tmp_path_factory.mktemp("source")
    command = [
        "git",
        "ls-files",
        "-co",
        "--exclude-standard",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "tierfs",
    ]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def environment(python: str, directory: Path) -> str:
    subprocess.run([python, "-m", "venv", directory], check=True)
    return str(directory / "bin" / "python")


def build(python: str, source: Path, directory: Path, **variables: str) -> Path:
    """Build a wheel as `pip install` does, and return its path."""
    own = directory / "source"
    shutil.copytree(source, own)
    command = [environment(python, directory / "venv"), "-m", "pip", "wheel", "-q", "--no-deps", "-w", directory, own]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr or "connection" in done.stderr:
        pytest.skip(f"pip cannot fetch setuptools: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    [wheel] = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the oldest Python with buffers in its limited API builds."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    oldest = min((version for version in PYTHONS if version >= LIMITED_SINCE), default=None)
    if oldest is None:
        pytest.skip("needs Python 3.11 or later")
    return build(PYTHONS[oldest], source, tmp_path_factory.mktemp("wheel"))


def installed(python: str, wheel: Path, directory: Path, look: str = LOOK) -> str:
    """Install a wheel into an environment of its own outside the clone, and return what a program prints there."""
    own = environment(python, directory / "venv")
    subprocess.run([own, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIERFS"))}
    done = subprocess.run([own, "-c", look], cwd=directory, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_tag_is_that_of_the_limited_api(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]


@pytest.mark.parametrize("version", [pytest.param(one, id=".".join(map(str, one))) for one in sorted(PYTHONS)])
def test_every_python_takes_a_wheel_with_its_kernels(version, source: Path, wheel: Path, tmp_path: Path) -> None:
    if version < LIMITED_SINCE:
        wheel = build(PYTHONS[version], source, tmp_path / "build")
        assert wheel.name.split("-")[2:4] == ["cp310", "cp310"]
    found = installed(PYTHONS[version], wheel, tmp_path)
    assert Path(found).is_relative_to(tmp_path), found


def test_without_a_compiler_the_wheel_is_for_all(source: Path, tmp_path: Path) -> None:
    wheel = build(sys.executable, source, tmp_path / "build", CC="/bin/false")
    assert wheel.name.split("-")[2:] == ["py3", "none", "any.whl"]
    look = "import tierfs.kernels as kernels; assert kernels.active is None; print(kernels.status())"
    assert installed(sys.executable, wheel, tmp_path, look).startswith("NumPy (not built: ")
