"""Tensor programs work in a mount, even while a file that they mapped is replaced."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import mounts
import pytest
from mounts import run

mounts.require()

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("default")


def state(seed):
    torch.manual_seed(seed)
    return {f"layer{number}.weight": torch.randn(300, 500) for number in range(4)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_safetensors_are_saved_loaded_and_saved_over(mounted_s3):
    path = mounted_s3 / "model.safetensors"
    safetensors.save_file(state(1), path)
    old = safetensors.load_file(path)
    assert_same(old, state(1))
    safetensors.save_file(state(2), path)
    assert_same(safetensors.load_file(path), state(2))
    assert_same(old, state(1))


def test_torch_saves_and_loads_a_map(mounted_s3):
    path = mounted_s3 / "state.pt"
    torch.save(state(1), path)
    old = torch.load(path, mmap=True, weights_only=True)
    torch.save(state(2), path)
    assert_same(torch.load(path, weights_only=True), state(2))
    assert_same(torch.load(path, mmap=True, weights_only=True), state(2))
    assert_same(old, state(1))


def test_a_map_keeps_its_bytes_when_its_file_is_replaced_or_removed(mounted_s3):
    path = mounted_s3 / "file"
    for replace in (
        lambda: path.write_bytes(b"new" * 1_000_000),
        path.unlink,
        lambda: ((mounted_s3 / "tmp").write_bytes(b"x"), os.replace(mounted_s3 / "tmp", path)),
    ):
        path.write_bytes(b"old" * 1_000_000)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            first = mapped[:10]
            replace()
            assert first == b"oldoldoldo"
            # Also pages that the program has not read before.
            assert mapped[-2_000_000:] == (b"old" * 1_000_000)[-2_000_000:]


def test_what_two_programs_write_to_a_shared_map_is_published(mounted, tmp_path):
    path = mounted / "shared"
    path.write_bytes(bytes(2_000_000))
    program = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'r+b') as file, mmap.mmap(file.fileno(), 0) as mapped:\n"
        "    at = int(sys.argv[2])\n"
        "    mapped[at : at + 4] = b'here'\n"
        "    mapped.flush()\n"
        "    assert mapped[at : at + 4] == b'here'\n"
    )
    for at in (10, 1_500_000):
        run("python3", "-c", program, path, at)
    content = bytearray(2_000_000)
    content[10:14] = content[1_500_000:1_500_004] = b"here"
    assert path.read_bytes() == content


def test_a_map_of_a_closed_file_can_still_be_written(mounted):
    path = mounted / "file"
    path.write_bytes(bytes(100_000))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    mapped[5:7] = b"ab"
    mapped.flush()
    mapped[50_000:50_002] = b"cd"
    mapped.close()
    content = path.read_bytes()
    assert (content[5:7], content[50_000:50_002]) == (b"ab", b"cd")


def test_transformers_save_over_what_is_mapped(mounted_s3):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    directory = mounted_s3 / "model"
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    torch.manual_seed(1)
    first = transformers.GPT2LMHeadModel(config)
    first.save_pretrained(directory)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(directory)
    torch.manual_seed(2)
    second = transformers.GPT2LMHeadModel(config)
    second.save_pretrained(directory)
    assert_same(loaded.state_dict(), first.state_dict())
    assert_same(transformers.GPT2LMHeadModel.from_pretrained(directory).state_dict(), second.state_dict())


def test_a_trainer_that_is_killed_resumes_in_the_mount(mounted):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    output = mounted / "out"
    command = [sys.executable, Path(__file__).with_name("hf_trainer.py"), output]
    # It waits after step 4: a trainer that is killed while it writes resumes from the part that it wrote.
    trainer = subprocess.Popen([*command, "4"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 120
    state = output / "checkpoint-4" / "trainer_state.json"  # the trainer writes it last, and not at once
    while not (state.exists() and state.read_bytes().endswith(b"}\n")):
        assert trainer.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    said = run(*command).split("\n")
    assert "from checkpoint-4" in said
    assert "done 12" in said
    assert sorted(path.name for path in output.iterdir() if path.name.startswith("checkpoint")) == [
        "checkpoint-10",
        "checkpoint-12",
    ]


def test_accelerate_saves_a_state_and_loads_it(mounted_s3):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.save_state(mounted_s3 / "state")
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(mounted_s3 / "state")
    assert_same(model.state_dict(), wanted)
