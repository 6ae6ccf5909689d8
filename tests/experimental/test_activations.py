"""`Activations` gives back the bytes that were saved, within its budgets, whatever becomes of the step."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from support.activation_models import Meter, WholeGpu, batch, gradients, new_model
from support.waiting import until
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tierfs.device import accelerator as accelerators
from tierfs.errors import InvalidInputError, StoreError
from tierfs.experimental.activations import Activations
from tierfs.experimental.activations.choice import SavedTensor, choose
from tierfs.experimental.activations.memory import Space, SpillFile
from tierfs.experimental.activations.regions import Phase, Region, Regions

MIB = 1 << 20


@pytest.fixture(params=["cpu", "gpu"])
def device(request):
    """The tensors' device: the CPU, or a fake GPU."""
    accelerators.accelerators.clear()
    if request.param == "gpu":
        accelerators.register_accelerator(WholeGpu())
    yield request.param
    accelerators.accelerators.clear()


@pytest.fixture
def gpu():
    accelerators.accelerators.clear()
    accelerators.register_accelerator(WholeGpu())
    yield
    accelerators.accelerators.clear()


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def new(disk):
    def make(ram, nvme="64MiB", **options):
        return Activations(ram, nvme, **{"min_bytes": "64KiB", "directory": disk, **options})

    return make


def _as_bytes(tensor):
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def plain_gradients():
    model = new_model()
    torch.manual_seed(3)
    model(batch()).backward()
    return gradients(model)


def step(activations, model=None, x=None):
    model = new_model() if model is None else model
    torch.manual_seed(3)
    with activations:
        loss = model(batch() if x is None else x)
    loss.backward()
    return gradients(model)


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("ram", ["64MiB", "4MiB", "2MiB"])
def test_gradients_are_equal_bit_for_bit(device, new, ram):
    activations = new(ram)
    wanted = plain_gradients()
    for _ in range(3):
        assert_equal(step(activations), wanted)
    stats = activations.stats()
    assert stats["offloaded_bytes"] > 16 * MIB
    assert stats["ram_bytes_max"] <= int(ram[:-3]) * MIB
    assert bool(stats["moved_bytes"].get("write")) == (ram != "64MiB")
    assert stats["failures"] == {}


KINDS = {
    "transposed": lambda: torch.randn(64, 32).t(),
    "every second": lambda: torch.randn(128, 64)[3::2, 1:],
    "overlapping": lambda: torch.randn(5000).as_strided((100, 50), (1, 1)),
    "expanded": lambda: torch.randn(3, 1, 5).expand(3, 1000, 5),
    "bool": lambda: torch.rand(64, 64) > 0.5,
    "complex": lambda: torch.randn(64, 64, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(64, 64, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(64, 64, dtype=torch.complex64).conj().imag,
    "float8": lambda: torch.randn(64, 64).to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(64, 64), 0.1, 3, torch.qint8),
    "odd offset": lambda: torch.arange(1001).to(torch.uint8)[3:],
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 5),
}


@pytest.mark.filterwarnings("ignore:.*quantiz")  # torch announces the end of quantized tensors
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_kind_come_back_as_they_were(device, new, kind):
    wanted, others = KINDS[kind](), [torch.randn(64, 64) for _ in range(6)]

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(context, x, *tensors):
            context.save_for_backward(*tensors)
            return x * 2

        @staticmethod
        def backward(context, gradient):
            found.extend(context.saved_tensors[:2])
            return gradient, *[None] * len(context.saved_tensors)

    found = []
    with new("64KiB", min_bytes=0):
        loss = Saves.apply(torch.ones(1, requires_grad=True), wanted, wanted, *others)
    loss.backward()
    for one in found:
        assert (one.dtype, one.shape, one.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        if wanted.is_quantized:
            assert torch.equal(one.int_repr(), wanted.int_repr())
        else:
            assert torch.equal(_as_bytes(one), _as_bytes(wanted))


def test_tensors_that_share_a_storage_are_offloaded_once(device, new):
    activations = new("64MiB")
    x = torch.randn(256, 768, requires_grad=True)
    with activations:
        y = x * 2  # saves nothing
        query, key, value = y.chunk(3, dim=1)
        loss = (query * key * value * query).sum() + y.exp().sum()
    loss.backward()
    stats = activations.stats()
    assert stats["offloaded"] > 4
    # The products of two and of three, y once, and exp's result.
    assert stats["offloaded_bytes"] == (256 * 768 * 2 + 256 * 256 * 2) * 4


def test_parameters_and_their_views_are_kept(device, new):
    activations = new("64MiB")
    weight = torch.nn.Parameter(torch.randn(512, 512))
    with activations:
        loss = (torch.nn.functional.linear(torch.randn(4, 512, requires_grad=True), weight) @ weight[:, :256]).sum()
    loss.backward()
    assert activations.stats()["kept"]["parameter"] >= 2
    assert activations.stats()["offloaded"] == 0


@pytest.mark.outlived  # autograd keeps the graph of a failed backward, and so the bytes and their threads
def test_a_change_in_place_is_an_error_as_without_it(device, new):
    x = torch.randn(256, 256, requires_grad=True)
    for activations in (None, new("64MiB"), new("1MiB")):
        y = x * 2
        with activations or torch.enable_grad():
            loss = y.view(-1).exp().sum() + y.view(512, 128).square().sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_the_oldest_bytes_are_spilled_and_the_next_are_read_ahead(disk):
    regions = Regions(Space(4 * MIB), SpillFile(disk, 64 * MIB))
    sources = [torch.full((MIB,), number, dtype=torch.uint8) for number in range(8)]
    held = [regions.hold(source, None) for source in sources]
    until(lambda: Phase.SPILLING not in [region.phase for region in held])
    # Three quarters of the budget stay full, so that the next tensor finds room.
    assert [region.phase for region in held] == [Phase.DISK] * 5 + [Phase.RAM] * 3
    while held:
        region, number = held.pop(), len(held)
        assert torch.equal(regions.restore(region), sources[number])
        del region
        if number == 5:
            assert [region.phase for region in held] == [Phase.DISK] * 3 + [Phase.COMING] * 2
    assert regions.stats()["disk_bytes"] == 0
    assert regions.memory.taken_bytes == 0


def test_tensors_without_room_stay(device, new):
    activations = new("1MiB", nvme="2MiB")
    assert_equal(step(activations), plain_gradients())
    stats = activations.stats()
    assert stats["kept"]["no room"] > 0
    assert stats["failures"]["full"] > 0
    assert stats["disk_bytes"] == 0


def test_a_file_that_cannot_grow_keeps_tensors_in_memory(disk):
    # The limit on a process's files stands for a full disk.
    code = """
        import resource, sys, torch
        sys.path.insert(0, "tests")
        from support.activation_models import batch, gradients, new_model
        from tierfs.experimental.activations import Activations
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        activations = Activations("2MiB", "64MiB", min_bytes="64KiB", directory=sys.argv[1])
        found = []
        for one in (None, activations):
            model = new_model()
            torch.manual_seed(3)
            with one or torch.enable_grad():
                loss = model(batch())
            loss.backward()
            found.append(gradients(model))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
        stats = activations.stats()
        assert stats["failures"]["write"] and stats["kept"]["no room"], stats
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), disk], check=True)


def test_a_kill_during_a_spill_leaves_no_file(disk):
    code = """
        import sys, torch
        from tierfs.experimental.activations import Activations
        activations = Activations("4MiB", "1GiB", directory=sys.argv[1], min_bytes=0)
        y = torch.randn(1 << 18, requires_grad=True)
        print("ready", flush=True)
        with activations:
            while True:
                y = y.sin()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), disk], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert list(disk.iterdir()) == []


def test_a_forked_process_must_make_its_own(disk):
    # In a process of its own: torch's threads do not survive a fork.
    code = """
        import os, sys, torch
        sys.path.insert(0, "tests")
        from support.activation_models import batch, new_model
        from tierfs.errors import InvalidInputError
        from tierfs.experimental.activations import Activations
        torch.set_num_threads(1)

        def make():
            return Activations("1MiB", "64MiB", min_bytes="64KiB", directory=sys.argv[1])

        def step(activations):
            with activations:
                loss = new_model()(batch())
            return loss

        activations = make()
        loss = step(activations)
        child = os.fork()
        if not child:
            code = 0
            for use in (lambda: step(activations), loss.backward):
                try:
                    use()
                    code = 1
                except InvalidInputError:
                    pass
            step(make()).backward()
            os._exit(code)
        loss.backward()
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), disk], check=True, timeout=120)


def test_a_thousand_steps_leave_nothing(new):
    activations = new("32KiB", nvme="1MiB", min_bytes="4KiB")
    threads = set()
    for number in range(1000):
        y = torch.randn(32, 64, requires_grad=True)
        try:
            with activations:
                for _ in range(6):
                    y = y.sin()
                if number % 3 == 0:
                    raise ArithmeticError("the forward pass fails")
            if number % 3 == 1:  # else the backward pass never comes
                y.sum().backward()
        except ArithmeticError:
            pass
        threads.add(threading.active_count())
    del y
    until(lambda: (gc.collect(), not any(isinstance(one, Region) for one in gc.get_objects()))[1], every_s=0.5)
    stats = activations.stats()
    assert stats["disk_bytes"] == 0
    assert stats["moved_bytes"]["write"] > MIB
    assert stats["failures"] == {}
    assert max(threads) <= min(threads) + 5
    assert_equal(step(activations), plain_gradients())


@pytest.mark.parametrize("ram", ["64MiB", "2MiB"])
def test_a_step_that_ends_early_frees_a_gpus_slots(gpu, new, ram):
    activations = new(ram)
    for _ in range(3):
        with pytest.raises(ArithmeticError), activations:
            new_model()(batch())
            raise ArithmeticError("the forward pass fails")
    assert_equal(step(activations), plain_gradients())
    assert activations.stats()["kept"].get("no room") is None
    assert activations.stats()["disk_bytes"] == 0


def test_bytes_that_the_disk_has_lost_are_one_clear_error(device, new, disk):
    activations = new("1MiB")
    x = torch.randn(MIB // 16, requires_grad=True)
    with activations:
        y = x
        for _ in range(12):
            y = y.sin()
    until(lambda: activations.stats()["moved_bytes"].get("write", 0) == 2 * MIB)  # all that does not fit into memory
    files = [fd for fd in os.listdir("/proc/self/fd") if _link(fd).startswith(str(disk))]
    os.truncate(f"/proc/self/fd/{files[0]}", 0)
    with pytest.raises(StoreError, match="are lost"):
        y.sum().backward()
    assert activations.stats()["failures"]["read"] >= 1


def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_a_failed_copy_leaves_tensors_on_the_gpu(gpu, new):
    activations = new("2MiB")
    accelerators.accelerators[0].fetch_error = StoreError("the link is down")
    assert_equal(step(activations), plain_gradients())
    assert activations.stats()["failures"]["drain"] > 0
    assert "drain" not in {step for step, moved in activations.stats()["moved_bytes"].items() if moved}


def test_tensors_are_kept_while_a_cuda_graph_is_captured(gpu, new):
    activations = new("64MiB")
    accelerators.accelerators[0].capturing = True
    assert_equal(step(activations), plain_gradients())
    assert activations.stats()["offloaded"] == 0
    assert activations.stats()["kept"]["CUDA graph"] > 0


def test_a_compiled_graph_is_offloaded_at_its_edges(new):
    activations, wanted = new("2MiB"), new_model(layers=1)
    torch.manual_seed(3)
    wanted(batch()).backward()
    model = new_model(layers=1)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_equal(step(activations, model), gradients(wanted))
    assert activations.stats()["offloaded"] > 3


def test_a_graph_that_is_kept_serves_two_backward_passes(device, new):
    activations = new("2MiB")
    found = []
    for one in (None, activations):
        model = new_model()
        torch.manual_seed(3)
        with one or torch.enable_grad():
            loss = model(batch())
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(gradients(model))
    assert_equal(found[1], found[0])


def test_several_forward_passes_before_one_backward_pass(device, new):
    activations = new("2MiB")
    found = []
    for one in (None, activations):
        model = new_model()
        torch.manual_seed(3)
        with one or torch.enable_grad():
            losses = [model(batch(seed)) for seed in (5, 6, 7)]
        losses[0].backward()
        sum(losses[1:]).backward()
        found.append(gradients(model))
    assert_equal(found[1], found[0])


def test_the_inputs_of_checkpointed_layers_are_offloaded(device, new):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def forward(self, x):
            for layer in self.model.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x.square().mean()

    activations = new("2MiB")
    found = step(activations, Checkpointed())
    assert_equal({name.removeprefix("model."): grad for name, grad in found.items()}, plain_gradients())
    assert activations.stats()["offloaded"] >= 9


@pytest.mark.parametrize("wrapper", [lambda layer: layer, checkpoint_wrapper])
def test_wrapped_layers_keep_only_their_inputs(device, new, wrapper):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([wrapper(layer) for layer in new_model().layers[::3]])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, scale=x.cos())
            return x.square().mean()

    wanted, model, activations = Scaled(), Scaled(), new("64MiB")
    wanted(batch()).backward()
    activations.wrap(model.layers)
    model(batch()).backward()
    assert_equal(gradients(model), gradients(wanted))
    # Each layer has one input and one scale of this size.
    assert activations.stats()["offloaded_bytes"] == 2 * len(model.layers) * batch().nbytes


def test_the_peak_of_the_gpus_memory_falls_by_two_fifths(gpu, new):
    peaks = []
    for one in (None, new("4MiB")):
        model = new_model(layers=6)
        torch.manual_seed(3)
        with Meter() as meter:
            with one or torch.enable_grad():
                loss = model(batch())
            loss.backward()
        peaks.append(meter.peak)
    assert peaks[1] <= 0.6 * peaks[0]


def test_auto_keeps_what_could_not_come_back_in_time(device, new, caplog):
    activations = new("2MiB", keep="auto")
    caplog.set_level("INFO", "tierfs.activations")
    wanted = plain_gradients()
    for _ in range(5):
        assert_equal(step(activations), wanted)
    assert "a step) are kept, because they could not come back in time" in caplog.text
    # The last tensors of the forward pass are needed at once.
    assert activations.stats()["kept"]["auto"] >= 2


def test_the_choice_follows_the_links():
    def kept(seconds_per_byte, ram_bytes=0):
        # A tensor of 10 bytes each second, needed in the opposite order from second 10 on.
        records = [SavedTensor(10, True, 1.0 + number, 20.0 - number) for number in range(10)]
        cost = dict.fromkeys(("drain", "write", "read", "rise"), seconds_per_byte)
        choose(records, ram_bytes, cost)
        return [number for number, record in enumerate(records) if record.is_kept]

    assert kept(0.0) == []
    # Ten bytes take half a second down to RAM, and as much to the disk: the last tensor is late.
    assert kept(0.05) == [9]
    # With enough RAM the disk does not matter.
    assert kept(0.1) == [8, 9]
    assert kept(0.1, ram_bytes=1000) == [9]
    # The slower the links, the more is kept.
    numbers = [len(kept(cost)) for cost in (0.1, 0.15, 0.2, 0.5)]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 10


def test_a_directory_in_memory_is_refused():
    with pytest.raises(InvalidInputError, match="give a directory= on a disk"):
        Activations("1GiB", "1GiB", directory=f"/dev/shm/tierfs-activations-{time.time_ns()}")


def test_a_budget_below_the_smallest_tensor_is_refused():
    with pytest.raises(InvalidInputError, match="has no room for a tensor of min_bytes='4MiB'"):
        Activations("1MiB")
