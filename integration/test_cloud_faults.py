"""Hundreds of operations on each cloud's server over a faulty network. Acknowledged data must be there and right."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import replace
from random import Random, SystemRandom

import pytest
import servers

import tierfs
from tierfs.errors import ConflictError, CorruptionError, NotFoundError, StoreError
from tierfs.store import verify
from tierfs.store.tree.records import observe
from tierfs.testing import PlannedTcpFault, TcpFault, TcpFaultProxy

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

OPERATIONS = 500
PATHS = [f"run/step_{step}/{name}" for step in range(4) for name in ("a.bin", "b.bin", ".metadata")]
IMPATIENT = {
    "s3": {"config_kwargs": {"connect_timeout": 2, "read_timeout": 2}},
    "abfs": {"connection_timeout": 2, "read_timeout": 2},
    "gcs": {"requests_timeout": 2},
}


@pytest.fixture(scope="module", params=["ministack", "azurite", "gcs_fake"])
def server(request):
    with servers.running(request.param) as server:
        yield server


def sends_content(method, path):
    """Select uploads. Without TLS nothing protects the names in a listing."""
    return method in ("PUT", "POST") and "delete" not in path and "batch" not in path


def fetches_content(method, path):
    """Select downloads of content.

    GCS's answers about an object are excluded: a generation with a flipped bit belongs to no object.
    """
    about = "/o/" in path and "alt=media" not in path
    return method == "GET" and "prefix=" not in path and not about


FAULTS = (
    PlannedTcpFault(TcpFault.RESET),
    PlannedTcpFault(TcpFault.RESET, at=0),  # the answer is lost
    PlannedTcpFault(TcpFault.RESET, side="request"),
    PlannedTcpFault(TcpFault.TRUNCATED),
    PlannedTcpFault(TcpFault.BLACK_HOLE, at=0),
    PlannedTcpFault(TcpFault.UNAVAILABLE, side="request"),
    PlannedTcpFault(TcpFault.BIT_FLIP, side="request", body_only=True, aim=sends_content),
    PlannedTcpFault(TcpFault.BIT_FLIP, body_only=True, aim=fetches_content),
)

# Chance may leave a fault out, so each also strikes several times at fixed points.
CERTAIN = [
    replace(
        fault,
        after=20 * (number + 1),
        aim=fault.aim or (fetches_content if fault.fault is TcpFault.TRUNCATED else None),
    )
    for number, fault in enumerate(FAULTS * 3)
]


class Model:
    """The contents that each path may have; ``None`` is no file.

    After a success it is one content. After a failure it is that content or the previous one. A failed operation may
    also take effect later, if the server was slow to begin it. Another success ends that, because the late operation's
    condition then fails.
    """

    def __init__(self):
        self.may_be = {path: {None} for path in PATHS}
        self.late = {path: set() for path in PATHS}

    def is_now(self, path, content):
        self.may_be[path] = {content}
        self.late[path] = set()

    def may_now_be(self, path, content):
        self.may_be[path] |= {content}
        self.late[path] |= {content}

    def saw(self, path, content):
        assert content in self.may_be[path], f"{path} holds what was never written to it"
        self.may_be[path] = {content} | self.late[path]


def operate(fs, root, random, model):
    """Run one random operation. It may fail, but it must not return bytes that were not written."""
    path = random.choice(PATHS)
    where = f"{root}/{path}"
    match random.choices(["write", "read", "range", "delete", "move", "list"], [10, 8, 4, 2, 2, 2])[0]:
        case "write":
            content = random.randbytes(random.choice([10, 5_000, 300_000, 2_500_000]))
            model.may_now_be(path, content)
            fs.pipe_file(where, content)
            model.is_now(path, content)
        case "read":
            try:
                model.saw(path, fs.cat_file(where))
            except FileNotFoundError:
                model.saw(path, None)
        case "range":
            start = random.randrange(4000)
            try:
                piece = fs.cat_file(where, start=start, end=start + 5000)
            except FileNotFoundError:
                model.saw(path, None)
            else:
                assert piece in {content[start : start + 5000] for content in model.may_be[path] if content is not None}
        case "delete":
            model.may_now_be(path, None)
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(where)
            model.is_now(path, None)
        case "move":
            target = random.choice([other for other in PATHS if other != path])
            sources = set(model.may_be[path])
            for content in sources:
                model.may_now_be(target, content)
            model.may_now_be(path, None)
            try:
                fs.mv(where, f"{root}/{target}")
            except FileNotFoundError:
                model.saw(path, None)
                return
            model.is_now(path, None)
            model.may_be[target], model.late[target] = sources - {None}, set()
        case "list":
            found = {name.removeprefix(f"{root}/") for name in fs.find(root)}
            for path in PATHS:
                assert path in found or None in model.may_be[path], f"{path} is not listed"
                assert path not in found or model.may_be[path] != {None}, f"{path} is listed"


def test_what_was_acknowledged_is_there_and_right_and_every_flip_is_caught(server, tmp_path):
    seed = int(os.environ.get("TIERFS_TEST_SEED") or SystemRandom().getrandbits(32))
    print(f"TIERFS_TEST_SEED={seed}")
    root = server.new_root()
    store = tierfs.init(f"{server.protocol}://{root}", options=server.options)
    assert store.descriptor.endpoint.missing == []
    random, model, failed = Random(seed), Model(), Counter()
    with TcpFaultProxy("127.0.0.1", server.port, CERTAIN, random=FAULTS, probability=0.06, seed=seed) as proxy:
        proxy.latency_s, proxy.bandwidth = 0.001, 100e6
        options = {**server.options_at(proxy.port), **IMPATIENT[server.protocol]}
        fs = tierfs.TierFileSystem(
            target_protocol=server.protocol, target_options=options, ack="object", ram="0", nvme="0"
        )
        for _ in range(OPERATIONS):
            try:
                operate(fs, root, random, model)
            except (StoreError, ConflictError, CorruptionError, NotFoundError) as error:
                failed[type(error).__name__] += 1
                print(f"{type(error).__name__}: {error}")
        fired = Counter((fault, path.rpartition("?")[0] != "") for fault, _, path, _ in proxy.fired)
    print(failed, fired)
    assert sum(failed.values()) < OPERATIONS // 10, "retries hide most of it"
    assert {fault for fault, _ in fired} == set(TcpFault)
    direct = tierfs.TierFileSystem(
        target_protocol=server.protocol, target_options=server.options, ack="object", ram="0", nvme="0"
    )
    for path in PATHS:
        try:
            model.saw(path, direct.cat_file(f"{root}/{path}"))
        except FileNotFoundError:
            model.saw(path, None)
    assert verify(store).damage == []


@pytest.mark.parametrize("fault", [TcpFault.RESET, TcpFault.TRUNCATED, TcpFault.BLACK_HOLE, TcpFault.BIT_FLIP])
def test_what_breaks_off_while_it_is_decoded_is_asked_for_again(server, fault):
    root = server.new_root()
    store = tierfs.init(f"{server.protocol}://{root}", options=server.options)
    content = b"".join(b"%d," % (number * number) for number in range(400_000))
    options = {"target_protocol": server.protocol, "ack": "object", "ram": "0", "nvme": "0", "codecs": "all"}
    direct = tierfs.TierFileSystem(target_options=server.options, skip_instance_cache=True, **options)
    direct.pipe_file(f"{root}/run/text", content)
    (row,) = observe(store, "run/text").manifest.rows
    assert 1_500_000 < row.stored_length < 0.8 * row.raw_length, "it is not encoded"
    with TcpFaultProxy("127.0.0.1", server.port) as proxy:
        through = {**server.options_at(proxy.port), **IMPATIENT[server.protocol]}
        fs = tierfs.TierFileSystem(target_options=through, skip_instance_cache=True, **options)
        fs.info(f"{root}/run/text")
        # In the third of five blocks: bytes are used as they arrive, and the earlier blocks are decoded by then.
        proxy.inject(fault, at=1_000_000, body_only=True, aim=fetches_content)
        assert fs.cat_file(f"{root}/run/text") == content
        assert [fired[0] for fired in proxy.fired] == [fault]
