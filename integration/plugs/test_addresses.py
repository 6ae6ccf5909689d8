"""The table in docs/reference/frameworks.md of programs and the addresses that they take: each cell is tried here."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="keras is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: docs/how-to/integration-tests.md")
pd = pytest.importorskip("pandas", reason="pandas is not installed: docs/how-to/integration-tests.md")
duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed: docs/how-to/integration-tests.md")
pl = pytest.importorskip("polars", reason="polars is not installed: docs/how-to/integration-tests.md")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
epath = pytest.importorskip("etils.epath", reason="etils is not installed")
wandb = pytest.importorskip("wandb", reason="wandb is not installed")
pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
pytest.importorskip("verl.checkpoint_engine", reason="verl is not installed")

import fsspec
import pyarrow.fs
import pyarrow.parquet as pq
import torch.distributed.checkpoint as dcp
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from torch.distributed.checkpoint.api import CheckpointException
from upath import UPath

import tierfs
from tierfs.dcp import TierWriter
from tierfs.plugs.epath import register
from tierfs.plugs.huggingface import save_pretrained
from tierfs.plugs.verl import TierWeightsEngine
from tierfs.plugs.wandb import register as register_references
from tierfs.train import Manager

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of other packages
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # they leave directories open
]
PAGE = Path(__file__).parents[2] / "docs/reference/frameworks.md"
TABLE = pa.table({"a": [1, 2]})
STATE = {"a": torch.arange(3)}
KERAS = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
CONFIG = transformers.LlamaConfig()
KINDS = ("`tierfs::s3://...`", "a named store, `tierfs://NAME/...`", "`fsspec+tierfs::...`")


def saved(manager):
    with manager:
        manager.save(1, STATE).wait()


def void(_):
    """Leave out a result, so that only what is written counts."""


def referred(url):
    """Return the entry of an artifact for a file, if it has the file's size."""
    written(fsspec.open(f"{url}/w", "wb"))
    (entry,) = wandb.Artifact("a", type="a").add_reference(f"{url}/w")
    return entry if entry.size else None


def sent(url):
    engine = TierWeightsEngine(1000, is_master=True, url=f"{url}/v")
    engine.init_process_group(engine.prepare())
    asyncio.run(engine.send_weights(STATE.items()))


def copied(url):
    with duckdb.connect() as sql:
        sql.register_filesystem(fsspec.filesystem("tierfs"))
        sql.execute(f"COPY (SELECT 1 AS a) TO '{url}/s.parquet'")


def written(target):
    with target as file:
        file.write(b"x")


# Each program, with an address, and with the filesystem object where it takes one.
PROGRAMS = {
    "`fsspec.open`, so `torch.save`": (lambda url: written(fsspec.open(f"{url}/f", "wb")), None),
    "`dcp.save`": (lambda url: void(dcp.save(STATE, checkpoint_id=f"{url}/1", no_dist=True)), None),
    "`TierWriter`": (lambda url: void(dcp.save(STATE, storage_writer=TierWriter(f"{url}/2"), no_dist=True)), None),
    "`Manager`, `TierCallback`": (lambda url: saved(Manager(f"{url}/run", save=())), None),
    "`tierfs.plugs.huggingface.save_pretrained`": (lambda url: save_pretrained(CONFIG, f"{url}/m"), None),
    "`epath.Path`, after `register()`": (lambda url: void(epath.Path(f"{url}/e").write_text("x")), None),
    "wandb's `add_reference`, after `register()`": (referred, None),
    "verl's engine, `TierWeightsEngine(url=...)`": (sent, None),
    "MLflow's artifacts": (lambda url: void(get_artifact_repository(f"{url}/ml").log_artifact(__file__)), None),
    "Keras 3's `save`": (lambda url: void(KERAS.save(f"{url}/k.keras")), None),
    "transformers' `save_pretrained`": (lambda url: void(CONFIG.save_pretrained(f"{url}/n")), None),
    "Python's `open`": (lambda url: written(open(f"{url}/o", "wb")), None),  # noqa: SIM115
    "`UPath`": (lambda url: void(UPath(f"{url}/p").write_bytes(b"x")), None),
    "pandas' `to_parquet`": (
        lambda url: pd.DataFrame({"a": [1]}).to_parquet(f"{url}/q"),
        lambda fs, path: pd.DataFrame({"a": [1]}).to_parquet(f"{path}/q2", filesystem=fs),
    ),
    "pyarrow's `write_table`": (
        lambda url: pq.write_table(TABLE, f"{url}/r"),
        lambda fs, path: pq.write_table(TABLE, f"{path}/r2", filesystem=fs),
    ),
    "pyarrow's `FileSystem.from_uri`": (pyarrow.fs.FileSystem.from_uri, None),
    'DuckDB, after `register_filesystem(fsspec.filesystem("tierfs"))`': (copied, None),
    "polars' `write_parquet`": (lambda url: pl.DataFrame({"a": [1]}).write_parquet(f"{url}/t.parquet"), None),
}


def works(fs, directory, call, *arguments):
    """Say whether a call works, and puts something into the store if it writes at all."""
    before = fs.find(directory)
    try:
        found = call(*arguments)
    except (Exception, CheckpointException):  # any refusal counts
        return "no"
    return "yes" if found is not None or fs.find(directory) != before else "no"


def test_the_page_says_which_addresses_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    register()
    register_references()
    store = f"file://{tmp_path}/store"
    tierfs.init(store)
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.runs]\nurl = "{store}"\n')
    monkeypatch.setenv("TIERFS_CONFIG", str(config))
    urls = [f"tierfs::{store}/a", "tierfs://runs/b", f"fsspec+tierfs::{store}/c"]
    fs, path = fsspec.url_to_fs(f"tierfs::{store}/d")
    root = path.rpartition("/")[0]
    lines = [f"| | {' | '.join(KINDS)} | the filesystem |", "| --- | --- | --- | --- | --- |"]
    for name, (by_url, by_object) in PROGRAMS.items():
        cells = [works(fs, root, by_url, url) for url in urls]
        cells.append("-" if by_object is None else works(fs, root, by_object, fs, path))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    wanted = "\n".join(lines)
    found = re.search(r"## Which address\n.*?(\| \|.*?\|)\n\n", PAGE.read_text(), re.DOTALL)
    assert found, f"the page needs this table:\n{wanted}"
    assert found[1] == wanted, f"the page needs this table:\n{wanted}"
    # fsspec takes `fsspec+tierfs` for a local file, as the page says.
    assert {each.name for each in tmp_path.iterdir()} == {"config.toml", "store", "fsspec+tierfs"}
