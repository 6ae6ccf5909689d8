"""An fsspec filesystem for processes of a test: local files whose listings wait while a file named ``gate`` is there."""

import os
import time
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

GATE = "TIERFS_TEST_GATE"


class GatedFileSystem(LocalFileSystem):
    """``gatedfile:///path``. The variable `GATE` has the path of the file."""

    protocol = ("gatedfile", "file")

    def ls(self, path, detail=False, **kwargs):
        while os.path.exists(os.environ[GATE]):
            time.sleep(0.01)
        return super().ls(path, detail, **kwargs)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("gatedfile://"))


def register(monkeypatch, directory):
    """Let the processes that the test starts find the filesystem. Return the path of the gate."""
    info = Path(directory) / "gatedfile-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gatedfile\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[fsspec.specs]\ngatedfile = support.gatedfile:GatedFileSystem\n")
    own = [str(directory), str(Path(__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH")))))
    gate = Path(directory) / "gate"
    monkeypatch.setenv(GATE, str(gate))
    return gate
