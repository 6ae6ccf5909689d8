"""DeepSpeed with its checkpoints in a store: killed runs go on, with ZeRO and without, and errors name the cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("deepspeed", reason="deepspeed is not installed: docs/how-to/integration-tests.md")

from running import trained

import tierfs

pytestmark = [pytest.mark.filterwarnings("default")]  # of DeepSpeed
EXAMPLE = Path(__file__).parent / "deepspeed_trainer.py"
LAST = 23
# On CPUs DeepSpeed compiles a module for communication, for a minute or more. It works without.
UNCOMPILED = """\
import runpy, sys
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def url(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    (tmp_path / "uncompiled.py").write_text(UNCOMPILED)
    (tmp_path / "tmp").mkdir()
    yield f"tierfs::file://{tmp_path}/store/run"
    assert not any((tmp_path / name).exists() for name in ("tierfs::file:", "global_step4", "latest"))


def run(tmp_path, ranks, *arguments, **options):
    command = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "uncompiled.py", EXAMPLE)
    return trained(tmp_path, *command, *arguments, TMPDIR=f"{tmp_path}/tmp", DS_ACCELERATOR="cpu", **options)


@pytest.mark.parametrize(
    ("stage", "ranks", "number"), [(0, 1, signal.SIGKILL), (1, 2, signal.SIGTERM), (3, 2, signal.SIGKILL)]
)
def test_a_killed_run_goes_on(url, tmp_path, stage, ranks, number):
    first, said, code = run(tmp_path, 2, url, stage, kill=(10, number))
    assert code == -signal.SIGKILL if number == signal.SIGKILL else code != 0, said
    assert f"checkpoints go to {url}; a save is done at staged" in said
    second, said, code = run(tmp_path, ranks, url, stage)
    assert (max(second, default=0), code) == (LAST, 0), said
    assert 1 < min(second) <= max(first) + 1
    both = first.keys() & second.keys()
    assert {step: second[step] for step in both} == pytest.approx({step: first[step] for step in both}, rel=1e-5)


PROGRAM = """
import os, sys
import deepspeed, torch
from tierfs.errors import NotFoundError
from tierfs.plugs.deepspeed import load_checkpoint, save_checkpoint

deepspeed.init_distributed("gloo")
url, model = sys.argv[1], torch.nn.Linear(3, 3)
settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
settings |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
own = engine.checkpoint_engine
assert load_checkpoint(engine, url) == (None, None)
save_checkpoint(engine, url, "first", client_state={"a": 1})
hooks = []
model.register_state_dict_post_hook(lambda *_: hooks.append("saved"))
model.register_load_state_dict_pre_hook(lambda *_: hooks.append("loaded"))
save_checkpoint(engine, url, "hooked")
load_checkpoint(engine, url, "hooked", custom_load_fn=lambda src, dst: hooks.append(sorted(src)))
load_checkpoint(engine, url, "hooked")
assert hooks == ["saved", ["bias", "weight"], "loaded"], hooks
save_checkpoint(engine, url, "first", client_state={"a": 1})
found, client_state = load_checkpoint(engine, url)
assert (found, client_state["a"]) == (f"{url}/first", 1)
save_checkpoint(engine, url)
assert load_checkpoint(engine, url)[0] == f"{url}/global_step0"
assert load_checkpoint(engine, url, "first", load_optimizer_states=False)[1]["a"] == 1
try:
    load_checkpoint(engine, url, "third")
except NotFoundError as error:
    assert "third" in str(error) and url in str(error), error
else:
    raise AssertionError
assert engine.checkpoint_engine is own
assert not [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("tierfs-deepspeed")]
print("DONE")
"""


def test_tags_are_chosen_and_missing_ones_refused(url, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    variables |= {"LOCAL_WORLD_SIZE": "1", "TMPDIR": f"{tmp_path}/tmp", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "uncompiled.py", "program.py", url],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "DONE" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    line = rf"loaded step 0 from {re.escape(url)}/first: at the level \w+, saved \d+ seconds ago, in \d+\.\d s"
    assert re.search(line, done.stdout + done.stderr)
    # DeepSpeed's own script makes plain weights of a local copy.
    subprocess.run([sys.executable, "-m", "tierfs.cli", "materialize", url, tmp_path / "copy"], check=True, timeout=60)
    script = [sys.executable, tmp_path / "copy" / "zero_to_fp32.py", tmp_path / "copy", tmp_path / "weights"]
    made = subprocess.run(
        script, capture_output=True, text=True, timeout=180, check=False, env={**os.environ, **variables}
    )
    assert made.returncode == 0, made.stderr[-3000:]
    assert list((tmp_path / "weights").iterdir())
