"""etils' epath on tierfs URLs, and Orbax over it: metadata and JSON go into the store, arrays are refused."""

from __future__ import annotations

import os
import pickle

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
pytest.importorskip("etils.epath", reason="etils is not installed: docs/how-to/integration-tests.md")
ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")

import numpy as np
from etils import epath

import tierfs
from tierfs.errors import InvalidInputError
from tierfs.plugs.epath import register

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of Orbax
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnhandledThreadExceptionWarning"
    ),  # its threads fail with the save
]


@pytest.fixture(params=["url", "named"])
def root(request, tmp_path, monkeypatch):
    """Return a path in a store, in both forms. The working directory shows what is written beside it."""
    store = f"file://{tmp_path}/store"
    tierfs.init(store)
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.runs]\nurl = "{store}"\n')
    monkeypatch.setenv("TIERFS_CONFIG", str(config))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    register()
    register()
    yield epath.Path("tierfs://runs/run" if request.param == "named" else f"tierfs::{store}/run")
    assert not os.listdir(".")


def test_a_path_keeps_its_url_and_its_parts(root):
    url = str(root)
    below = root / "a" / "b.txt"
    assert (str(below), os.fspath(below), below.as_posix()) == (f"{url}/a/b.txt",) * 3
    assert (below.name, below.parent.parent, below.is_absolute()) == ("b.txt", root, True)
    assert (below.relative_to(root).as_posix(), below.resolve()) == ("a/b.txt", below)
    assert (epath.Path(str(below)), pickle.loads(pickle.dumps(below))) == (below, below)
    s3 = epath.Path("tierfs::s3://bucket/run") / "step"
    assert (str(s3), str(s3.parent.parent)) == ("tierfs::s3://bucket/run/step", "tierfs::s3://bucket")
    assert isinstance(epath.Path("tmp/plain"), epath.Path)


def test_files_and_directories(root):
    (root / "d").mkdir(parents=True)
    (root / "d" / "one.txt").write_text("ü")
    (root / "two.bin").write_bytes(b"two")
    assert (root / "d" / "one.txt").read_text() == "ü"
    assert sorted(path.name for path in root.iterdir()) == ["d", "two.bin"]
    assert list(root.glob("*.bin")) == [root / "two.bin"]
    assert [(path, sorted(names), files) for path, names, files in root.walk()] == [
        (root, ["d"], ["two.bin"]),
        (root / "d", [], ["one.txt"]),
    ]
    assert ((root / "two.bin").stat().length, (root / "d").is_dir()) == (3, True)
    (root / "two.bin").copy(root / "three.bin")
    (root / "three.bin").replace(root / "two.bin")
    (root / "d").rename(root / "e")
    assert ((root / "e" / "one.txt").exists(), (root / "d").exists()) == (True, False)
    with pytest.raises(FileNotFoundError):
        (root / "missing").read_text()
    with pytest.raises(FileExistsError):
        (root / "two.bin").rename(root / "e")
    root.rmtree()
    assert not root.exists()


def test_orbax_keeps_its_metadata_and_json(root):
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(root, options=options, item_names=("about",), metadata={"run": "gpt"}) as manager:
        for step in range(4):
            manager.save(step, args=ocp.args.Composite(about=ocp.args.JsonSave({"step": step})))
        manager.wait_until_finished()
    with ocp.CheckpointManager(root, item_names=("about",)) as manager:
        assert manager.all_steps() == [2, 3]
        found = manager.restore(3, args=ocp.args.Composite(about=ocp.args.JsonRestore()))
        assert found["about"] == {"step": 3}
        assert manager.metadata().custom_metadata == {"run": "gpt"}


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_orbax_refuses_to_write_arrays(root, use_ocdbt):
    with (
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer,
        pytest.raises(InvalidInputError, match="tierfs mount"),
    ):
        checkpointer.save(root / "step", args=ocp.args.PyTreeSave({"a": np.ones(3), "b": "text"}))
    assert not (root / "step").exists()
