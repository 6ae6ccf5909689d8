"""Fixtures of the tests of the command line."""

import json
import os

import pytest

import tierfs
from tierfs.cli import main
from tierfs.session import open_store, parse_url


@pytest.fixture
def url(tmp_path):
    """The URL of a new store."""
    tierfs.init(str(tmp_path / "store"))
    return f"tierfs::file://{tmp_path}/store"


@pytest.fixture
def store(url):
    return open_store(parse_url(url))[0]


@pytest.fixture
def root(tmp_path):
    """The directory of a new store with the files ``a`` and ``b``, of one chunk each."""
    assert main(["init", str(tmp_path / "store"), "--lease", "1", "--grace", "2"]) == 0
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(os.urandom(100_000))
        assert main(["cp", str(tmp_path / name), f"tierfs::file://{tmp_path}/store/{name}"]) == 0
    return tmp_path / "store"


@pytest.fixture
def tell(capsys):
    """Run a command, and return its stdout. It ends with the exit code 0, or another given one."""

    def run(*words, code=0):
        capsys.readouterr()
        assert main([str(word) for word in words]) == code, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def told(tell):
    """Run a command as `tell` does, and return its JSON document."""

    def run(*words, code=0):
        return json.loads(tell(*words, "--json", code=code))

    return run


@pytest.fixture
def fail(capsys):
    """Run a command that fails, and return its exit code and the error that it reports in JSON."""

    def run(*words):
        capsys.readouterr()
        code = main([*map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)["error"]

    return run
