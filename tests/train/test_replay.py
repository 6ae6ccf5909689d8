"""Logged steps are made again bit for bit, or not at all."""

import json
import logging
import os
import re
import signal
import time

import pytest
import torch
from support.replay_cases import FEATURES, GROUP_AT, OPTIMIZERS, PAIRS, WAYS, Training
from support.torch_ranks import zygote

from tierfs.checkpoint.notes import logged_steps
from tierfs.checkpoint.step_logs import open_log, remove_files
from tierfs.cli import main
from tierfs.demo.model import ByteGPT, ByteStream, shape_for, standard_library_text
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.host.pending.levels import Level
from tierfs.session import open_store, parse_url
from tierfs.store import find, level_of, load, stat, wait
from tierfs.store import save as write
from tierfs.train import Every, Manager, Replay, TrainState

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"ram": "96MiB", "nvme": "0", "timeout": 60.0}
STEPS = 12
STOPPED = 9


def manager(root, *save, **arguments):
    return Manager(root, save=[*save, Replay(**{"ring": "16MiB", "prove_every": 4, **arguments})], **OPTIONS)


def train(run, training, steps):
    losses = []
    for step in steps:
        run.wait()
        losses.append(training.step(step))
        run.step(step, training.state, metrics={"loss": float.fromhex(losses[-1])})
    return losses


def straight(*arguments, steps=STEPS):
    training = Training(*arguments)
    return [training.step(step) for step in range(steps)], training.content()


@pytest.mark.parametrize(("optimizer", "way"), PAIRS)
def test_each_feature_is_replayed_bit_for_bit(memory_root, optimizer, way):
    # All features at once, and a third of them alone: each one meets each way, and each optimizer that has three ways.
    place = (list(OPTIMIZERS).index(optimizer) + list(WAYS).index(way)) % 3
    *alone, together = FEATURES
    for number, feature in enumerate([together, *alone[place::3]]):
        losses, content = straight(optimizer, way, (feature,))
        url = f"{memory_root}/{number}"
        with manager(url) as run:
            assert train(run, Training(optimizer, way, (feature,)), range(STOPPED)) == losses[:STOPPED]
        groups = 2 if feature in {"later group", "all"} else 1
        resumed = Training(optimizer, way, (feature,), groups=groups)
        with manager(url) as run:
            restored = run.restore(resumed.state)
            assert restored.notes == (), feature
            assert (restored.step, restored.stopped, restored.is_exact) == (STOPPED - 1, "", True), feature
            assert restored.replayed == (STOPPED - 1 - GROUP_AT if groups == 2 else STOPPED - 1)
            assert train(run, resumed, range(STOPPED, STEPS)) == losses[STOPPED:], feature
        assert resumed.content() == content, feature


def trained(url, steps=STOPPED, **arguments):
    """Log steps, and return the file names of the log in order."""
    with manager(url, **arguments) as run:
        train(run, Training(), range(steps))
    return log_of(url)


def settle(url):
    """Wait until the run's store has nothing pending, and return it."""
    store, _ = open_store(parse_url(url))
    wait(store, "", Level.OBJECT, 60)
    return store


def log_of(url):
    store, run = open_store(parse_url(url))
    return [(one.store, one.path(run)) for one in logged_steps(run, store, open_log(store, run))]


def resume(url, training=None, **arguments):
    training = training or Training()
    with manager(url, **arguments) as run:
        return run.restore(training.state), training


def is_exact_at(training, step):
    """Whether a training is in the state that an uninterrupted one has after a step."""
    return training.content() == straight(steps=step + 1)[1]


def test_a_missing_file_stops_before_its_step(root):
    store, path = trained(root)[4]
    remove_files(store, [path])
    restored, training = resume(root)
    assert (restored.step, restored.replayed) == (4, 4)
    assert "not every rank has the file of the step after 4" in restored.stopped
    assert is_exact_at(training, 4)


def test_an_altered_file_stops_before_its_step(root):
    store, path = trained(root)[5]
    reference = next(slot for slot in store.tiers.drafts.pending(path).draft.slots[1:])
    segment = store.tiers.ram.segment(reference.segment)
    slot = segment.slot(reference.index)
    with segment.path.open("r+b") as file:
        file.seek(slot.offset + 40)
        file.write(b"altered!")
    restored, training = resume(root)
    assert (restored.step, restored.replayed) == (5, 5)
    assert restored.stopped
    assert is_exact_at(training, 5)


@pytest.mark.parametrize(
    ("place", "found"),
    [(0, "step 5: the weights differ from the sample in the log"), (-1, "step 8: the state differs from the digest")],
)
def test_a_state_that_differs_goes_back_to_the_last_proof(root, place, found):
    trained(root)
    training = Training()
    made = []

    def disturb(optimizer, *_):
        made.append(len(made))
        if len(made) == 6:  # the first one is torch's own, for the restore
            optimizer.param_groups[0]["params"][0].data[place, place] += 1e-7

    training.optimizer.register_step_post_hook(disturb)
    restored, _ = resume(root, training)
    assert (restored.step, restored.replayed) == (4, 4)
    assert found in restored.stopped
    assert restored.is_exact
    assert is_exact_at(training, 4)


def test_another_number_of_threads_makes_no_step_again(root):
    trained(root)
    torch.set_num_threads(2)
    restored, training = resume(root)
    assert (restored.step, restored.replayed) == (0, 0)
    assert restored.stopped == "step 1: threads was 1, and is 2"
    torch.set_num_threads(1)
    assert is_exact_at(training, 0)


def test_other_parameters_make_no_step_again(root):
    trained(root)
    training = Training()
    training.optimizer.param_groups[0]["params"].pop()
    restored, _ = resume(root, training)
    assert (restored.step, restored.is_exact) == (0, False)
    assert "the checkpoint itself is not restored exactly" in restored.stopped


def test_another_optimizer_makes_no_step_again(root):
    trained(root)
    restored, _ = resume(root, Training("adam"))
    assert (restored.step, restored.replayed) == (0, 0)
    assert restored.stopped == "step 1: the optimizer was a torch.optim.adamw.AdamW, and is a torch.optim.adam.Adam"


def test_a_step_in_hand_is_lost_and_training_goes_on(root):
    losses, content = straight()
    with manager(root) as run:
        training = Training()
        train(run, training, range(STOPPED))
        training.step(STOPPED)  # its end is never reported
    restored, training = resume(root)
    assert restored.step == STOPPED - 1
    with manager(root) as run:
        run.restore(training.state)
        assert train(run, training, range(STOPPED, STEPS)) == losses[STOPPED:]
    assert training.content() == content


def test_steps_after_a_second_resume_are_made_again(root):
    losses, content = straight()
    first = Training()
    with manager(root) as run:
        train(run, first, range(4))
    for begin, end in ((4, 7), (7, 9)):
        restored, training = resume(root)
        assert restored.step == begin - 1
        with manager(root) as run:
            run.restore(training.state)
            assert train(run, training, range(begin, end)) == losses[begin:end]
    restored, training = resume(root)
    assert (restored.step, restored.replayed) == (8, 8)
    with manager(root) as run:
        run.restore(training.state)
        assert train(run, training, range(9, STEPS)) == losses[9:]
    assert training.content() == content


def test_files_go_when_a_later_full_save_is_complete(root):
    with manager(root, Every(steps=5)) as run:
        train(run, Training(), range(8))
    assert [path.rpartition("/")[2] for _, path in log_of(root)] == [
        f"{step}-{step + 1}.rank-00000-of-00001.safetensors" for step in (5, 6)
    ]


def test_steps_that_a_chosen_step_leaves_behind_are_gone(root):
    with manager(root, Every(steps=5)) as run:
        train(run, Training(), range(8))
    training = Training()
    with manager(root) as run:
        assert run.restore(training.state, step=5).replayed == 0
        assert len(log_of(root)) == 2
        train(run, training, range(6, 7))
    restored, _ = resume(root)
    assert (restored.step, restored.replayed) == (6, 1)


def test_a_logged_step_is_restored_if_it_is_chosen(root):
    losses, content = straight()
    with manager(root, every=2) as run:
        train(run, Training(), range(STOPPED))
    training = Training()
    with manager(root, every=2) as run:
        with pytest.raises(NotFoundError, match="step 5 cannot be restored: after step 4: no file of the log ends at"):
            run.restore(training.state, step=5)
        assert run.restore(training.state).step == 8
        restored = run.restore(training.state, step=4)
        assert (restored.step, restored.replayed, restored.stopped, restored.is_exact) == (4, 2, "", True)
        assert is_exact_at(training, 4)
        assert run.verify_resume(training.state, lambda step: float.fromhex(training.step(step))).step == 4
        assert train(run, training, range(5, STEPS)) == losses[5:]
    assert training.content() == content
    restored, training = resume(root)
    assert restored.step == STEPS - 2


def test_a_full_ring_asks_for_a_save_and_blocks_nothing(root, caplog):
    size = 12_000
    with manager(root, ring=4 * size) as run, caplog.at_level(logging.WARNING):
        train(run, Training(), range(STOPPED))
        run.wait()
        assert len(run.checkpoints) >= 3
    assert sum(store.tiers.drafts.pending(path).draft.length for store, path in log_of(root)) <= 4 * size
    restored, training = resume(root)
    assert restored.step == STOPPED - 1
    assert is_exact_at(training, STOPPED - 1)


def test_several_steps_share_a_file(root):
    losses, content = straight()
    with manager(root, every=3) as run:
        train(run, Training(), range(STOPPED))
    restored, training = resume(root)
    assert (restored.step, restored.replayed) == (6, 2)
    with manager(root, every=3) as run:
        run.restore(training.state)
        assert train(run, training, range(7, STEPS)) == losses[7:]
    assert training.content() == content


@pytest.mark.parametrize("level", ["local", "peer", "object"])
def test_published_files_are_made_again_and_removed(root, level):
    training = Training()
    with manager(root, Every(steps=5), level=level) as run:
        train(run, training, range(5))
        store, path = log_of(root)[-1]
        wait(store, "", Level.OBJECT, 60)
        assert level_of(store, path) is Level.OBJECT
        restored, other = resume(root, level=level)
        assert (restored.step, restored.level) == (4, "object")
        assert is_exact_at(other, 4)
        train(run, training, [5])
        wait(store, "", Level.OBJECT, 60)
        time.sleep(1.1)  # it looks once a second whether the save has come there
        train(run, training, [6])
    assert [path.rpartition("/")[2][:4] for _, path in log_of(root)] == ["5-6."]


def test_the_log_stays_in_memory_of_its_own(root):
    log, path = trained(root, steps=5)[-1]
    store = settle(root)
    assert level_of(log, path) is Level.STAGED
    assert find(store, path.partition("/replay/")[0] + "/replay") == []
    restored, _ = resume(root)
    assert (restored.step, restored.level) == (4, "staged")


def test_a_closure_is_refused(root):
    training = Training("sgd")
    with manager(root) as run:
        train(run, training, range(2))
        with pytest.raises(InvalidInputError, match="closure"):
            training.optimizer.step(lambda: 0.0)


def test_an_optimizer_that_is_not_elementwise_is_refused(root):
    training = Training()
    training.optimizer = torch.optim.Adafactor(training.model.parameters())
    training.state.optimizer = training.optimizer
    with manager(root) as run, pytest.raises(InvalidInputError, match="Adafactor cannot be made again bit for bit"):
        train(run, training, range(1))


def test_an_approximate_replay_says_so(root):
    def approximate():
        training = Training()
        training.optimizer = torch.optim.Adafactor(training.model.parameters())
        training.state.optimizer = training.optimizer
        return training

    with manager(root, allow_approximate=True) as run:
        train(run, approximate(), range(4))
    restored, _ = resume(root, approximate(), allow_approximate=True)
    assert (restored.step, restored.replayed) == (3, 3)
    assert not restored.is_exact
    assert "only approximately" in restored.notes[0]


class Lion(torch.optim.Optimizer):
    """A user's elementwise optimizer."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                moment = self.state[each].setdefault("moment", torch.zeros_like(each))
                each.add_((moment * 0.9 + each.grad * 0.1).sign(), alpha=-group["lr"])
                moment.mul_(0.99).add_(each.grad, alpha=0.01)


def lions():
    training = Training()
    training.optimizer = training.state.optimizer = Lion(training.model.parameters(), 1e-3)
    return training


def test_a_registered_optimizer_is_replayed(root):
    with manager(root, elementwise=[Lion]) as run:
        train(run, lions(), range(6))
    expected = lions()
    for step in range(6):
        expected.step(step)
    restored, training = resume(root, lions(), elementwise=[Lion])
    assert (restored.step, restored.is_exact) == (5, True)
    assert training.content() == expected.content()


def test_parameters_changed_by_hand_end_the_log(root, caplog):
    training = Training()
    with manager(root) as run, caplog.at_level(logging.WARNING):
        train(run, training, range(4))
        with torch.no_grad():
            training.head.weight.mul_(0.5)
        train(run, training, range(4, 8))
        run.wait()
    assert "changed outside of optimizer.step()" in caplog.text
    restored, other = resume(root)
    assert restored.step == 7
    assert other.content() == training.content()


def test_weights_changed_through_data_end_the_log_at_that_step(root, caplog):
    training = Training()
    with manager(root) as run, caplog.at_level(logging.WARNING):
        train(run, training, range(4))
        training.head.bias.data.mul_(0.5)
        train(run, training, range(4, 8))
        run.wait()
    assert "changed outside of optimizer.step()" in caplog.text
    restored, other = resume(root)
    assert (restored.step, restored.stopped) == (7, "")
    assert other.content() == training.content()


def test_weights_clamped_after_each_step_log_nothing_wrong(root, caplog):
    training = Training()
    with manager(root) as run, caplog.at_level(logging.WARNING):
        for step in range(8):
            training.step(step)
            for each in training.model.parameters():
                each.data = each.data.clamp(-0.01, 0.01)
            run.step(step, training.state)
            run.wait()
    assert "steps are logged no longer" in caplog.text
    assert log_of(root) == []


def test_sparse_gradients_and_a_dict_as_the_state(root):
    def make():
        torch.manual_seed(3)
        model = torch.nn.Embedding(20, 4, sparse=True)
        return model, {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "seen": 0,
            "mean": torch.zeros(4),
        }

    def train_one(model, state, step):
        rows = model(torch.tensor([step, step, 7]))
        rows.square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["seen"] += 3
        state["mean"] += rows.detach().mean(0)

    model, state = make()
    with manager(root) as run:
        for step in range(6):
            train_one(model, state, step)
            run.step(step, state)
            run.wait()
    again, restored_state = make()
    with manager(root) as run:
        assert run.restore(restored_state).step == 5
    assert torch.equal(again.weight, model.weight)
    assert restored_state["seen"] == 18
    assert torch.equal(restored_state["mean"], state["mean"])


class Lived:
    """An extra value without content."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


KILLED = ("after backward", "before the copy", "after the copy", "after the step", "in the file", "after the file")


def live(url, where, at, directory):
    """Train until killed at a point of a step. Note each loss."""
    torch.set_num_threads(1)
    training = Training()
    killing = False

    def kill(*_):
        if killing:
            os.kill(os.getpid(), signal.SIGKILL)

    class Killing(Lived):
        def state_dict(self):
            if where == "in the file":
                kill()
            return {}

    training.state.extra = {"killing": Killing()}
    run = Manager(url, save=[Replay(ring="16MiB", prove_every=4)], **OPTIONS)
    if where == "before the copy":
        training.optimizer.register_step_pre_hook(kill)
    for step in range(STEPS):
        killing = step == at
        if killing and where == "after the copy":
            training.optimizer.register_step_pre_hook(kill)
        if where == "after backward":
            kill()
        training.step(step)
        if where == "after the step":
            kill()
        run.step(step, training.state)
        if where == "after the file":
            kill()
        run.wait()


@pytest.mark.parametrize("where", KILLED)
def test_a_process_killed_at_any_point_of_a_step_loses_that_step_at_most(root, where, tmp_path):
    losses, content = straight()
    process = zygote.start(live, root, where, 6, str(tmp_path))
    process.join()
    assert process.exitcode == -signal.SIGKILL

    training = Training()
    training.state.extra = {"killing": Lived()}
    with manager(root) as run:
        restored = run.restore(training.state)
        assert restored.step == (6 if where == "after the file" else 5)
        assert (restored.replayed, restored.stopped) == (restored.step, "")
        assert train(run, training, range(restored.step + 1, STEPS)) == losses[restored.step + 1 :]
    assert training.content() == content


def test_a_resume_with_steps_made_again_is_proven(root):
    losses, content = straight()
    trained(root)
    training = Training()
    with manager(root) as run:
        report = run.verify_resume(training.state, lambda step: float.fromhex(training.step(step)))
        assert report.is_proven, str(report)
        assert (report.step, report.replayed) == (8, tuple(range(1, 9)))
        assert train(run, training, range(STOPPED, STEPS)) == losses[STOPPED:]
    assert training.content() == content


def test_a_resume_whose_steps_came_out_otherwise_is_not_proven(root):
    trained(root)
    training = Training()
    with manager(root) as run:
        run.restore(training.state)
        with torch.no_grad():
            training.head.bias[0] += 1e-7
        report = run.verify_resume(training.state, lambda step: float.fromhex(training.step(step)))
    assert str(report.first_difference) == "steps made again: different: rank 0"
    assert training.content() == straight(steps=STOPPED)[1]


@pytest.mark.parametrize("below", ["/run", ""])
def test_commands_show_the_log(root, below, capsys):
    root = root.removesuffix("/run") + below
    with manager(root, Every(steps=5)) as run:
        train(run, Training(), range(8))
    url = root.removeprefix("tierfs::")
    assert main(["checkpoint", "ls", url]) == 0
    assert "5 (+2 steps)" in capsys.readouterr().out
    assert main(["checkpoint", "ls", url, "--json"]) == 0
    assert [each["logged_steps"] for each in json.loads(capsys.readouterr().out)["checkpoints"]] == [0, 2]
    for command in ("verify", "du"):
        assert main([command, url]) == 0
    assert main(["status", url]) == 0
    assert re.search("in ram only +2 files", capsys.readouterr().out)
    assert main(["gc", url.removesuffix("/run")]) == 0
    assert len(log_of(root)) == 2
    assert main(["rm", "-r", f"{url}/step_5"]) == 0
    assert main(["prune", url, "--keep", "latest:1"]) == 0
    assert len(log_of(root)) == 2
    assert main(["rm", "-r", f"{url}/replay"]) == 0
    assert log_of(root) == []


@pytest.mark.parametrize("gone", ["the log", "the run"])
def test_a_log_that_is_removed_leaves_no_memory(root, gone, capsys):
    trained(root)
    url = root.removeprefix("tierfs::")
    assert main(["rm", "-r", f"{url}/replay" if gone == "the log" else url]) == 0
    assert log_of(root) == []
    assert main(["status", url.removesuffix("/run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["ram_only_files"] == 0


def test_a_killed_process_leaves_no_room_that_nothing_uses(root, tmp_path):
    zygote.start(live, root, "after the copy", 6, str(tmp_path)).join()
    store, run = open_store(parse_url(root))
    usage = open_log(store, run).tiers.ram.usage()
    assert len(log_of(root)) == 5
    assert usage.used_bytes == usage.dirty_bytes > 0


def test_rubbish_in_the_log_is_passed_over(root):
    _, path = trained(root)[0]
    store, run = open_store(parse_url(root))
    log = open_log(store, run, budget_bytes=64 << 20)
    write(log, path.replace("/0-1.", "/8-9."), b"rubbish")
    write(log, path.replace("/0-1.", "/3-11."), b"rubbish")
    write(log, f"{path}.old", b"rubbish")
    write(store, path.replace("/0-1.", "/7-9."), b"rubbish")
    log.tiers.close()
    restored, training = resume(root)
    assert restored.step == 3
    assert "3-11" in restored.stopped
    assert is_exact_at(training, 3)


def test_a_log_takes_no_room_of_the_ram_tier(root):
    with manager(root, ring="96MiB") as run:
        train(run, Training(), range(6))
        store = settle(root)
        assert store.tiers.ram.usage().dirty_bytes == 0
        assert len(log_of(root)) == 5


def test_the_log_of_a_killed_process_survives_the_flushers_sweeps(root, tmp_path):
    process = zygote.start(live, root, "after the file", 6, str(tmp_path))
    process.join()
    log, path = log_of(root)[-1]
    for _ in range(2):  # the second time, another flusher begins
        store = settle(root)
        flusher = store.tiers.flusher.request("status", {}, timeout_s=30)["pid"]
        time.sleep(2.5)  # two of its sweeps
        os.kill(flusher, signal.SIGKILL)
    assert len(log_of(root)) == 6
    assert load(log, path)
    training = Training()
    training.state.extra = {"killing": Lived()}
    restored, _ = resume(root, training)
    assert (restored.step, restored.replayed) == (6, 6)


class Adapted(torch.nn.Module):
    """A linear layer with an adapter (LoRA), which alone is trained."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = torch.nn.Linear(inner.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, inner.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def adapters():
    torch.manual_seed(5)
    model = ByteGPT(shape_for(100_000)).requires_grad_(False)
    for block in model.blocks:
        block.linear1, block.linear2 = Adapted(block.linear1), Adapted(block.linear2)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    text = standard_library_text()[: 1 << 16]
    data = ByteStream(text, batch=2, context=32, rank=0, world_size=1, seed=1)
    return TrainState(model=model, optimizer=optimizer, scheduler=None, dataloader=data)


def adapt(state):
    state.optimizer.zero_grad()
    loss = state.model(*state.dataloader.next_batch())
    loss.backward()
    state.optimizer.step()
    return loss.item().hex()


def test_an_adapter_of_the_demos_model_is_replayed_from_a_small_log(root):
    plain = adapters()
    losses = [adapt(plain) for _ in range(10)]
    state = adapters()
    with manager(root) as run:
        for step in range(7):
            assert adapt(state) == losses[step]
            run.step(step, state)
            run.wait()
    trained_bytes = sum(each.nbytes for each in state.model.parameters() if each.requires_grad)
    store, path = log_of(root)[-1]
    assert stat(store, path).length < trained_bytes + 40_000
    again = adapters()
    with manager(root) as run:
        restored = run.restore(again)
        assert (restored.step, restored.replayed, restored.is_exact) == (6, 6, True)
        assert [adapt(again) for _ in range(7, 10)] == losses[7:]
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), plain.model.parameters(), strict=True))
