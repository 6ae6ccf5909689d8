"""Two or three hosts, each with a flusher process, over a directory that all of them see."""

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from support.peer_hosts import LEASE_S, PeerHost, bare, until

import tierfs
from tierfs.errors import ConflictError, StoreError
from tierfs.format.keys import record_key
from tierfs.format.lease import PeerRecord
from tierfs.format.manifest import decode_record
from tierfs.host.host import Host
from tierfs.host.local_state import forget, local_stores
from tierfs.peers.members import peer_key
from tierfs.peers.settings import Identity
from tierfs.peers.wire import dial
from tierfs.session import open_store, parse_url

pytest.importorskip("cryptography")
WAIT_S = 60


@pytest.fixture
def hosts(request, tmp_path, monkeypatch):
    """A function that makes a host. The hosts are killed at the end. The parameter is the lease in seconds."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "bare"))
    url = f"file://{tmp_path}/store"
    tierfs.init(url, lease_s=getattr(request, "param", LEASE_S))
    made = []

    def make(name, **settings):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        made.append(PeerHost(tmp_path, name, url, port, **settings))
        return made[-1].start()

    yield make
    for each in made:
        each.close()


def content(seed, size=300_000):
    return random.Random(seed).randbytes(size)


def read_all(url, names):
    fs, root = bare(url)
    if not all(fs.exists(f"{root}/run/{name}") for name in names):
        return None
    return {name: fs.cat_file(f"{root}/run/{name}") for name in names}


def save(host, contents, ack="peer"):
    fs, root = host.open(ack=ack)
    for name, data in contents.items():
        fs.pipe_file(f"{root}/run/{name}", data)
    return fs, root


def test_peers_go_on_beside_a_certificate_that_cannot_be_read(hosts):
    owner = hosts("a")
    record = PeerRecord(1, LEASE_S, "127.0.0.1", 7946, "", "host", b"not a certificate")
    bare_store = open_store(parse_url(f"tierfs::{owner.url}"))[0]
    bare_store.objects.put(peer_key(record.id), [record.encode()])
    hosts("b")
    save(owner, {"x": content(1)})
    until(lambda: owner.status()["peers"]["unreadable"] == 1, WAIT_S)


@pytest.mark.parametrize("level", ["staged", "peer"])
def test_a_log_of_steps_is_where_its_level_says(hosts, level):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    train = pytest.importorskip("tierfs.train")
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    model = torch.nn.Linear(20, 20)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def manager(host):
        tiers = {**host.settings, "state_dir": str(host.state), "ack": "peer", "on_stale": "ignore"}
        return train.Manager(f"tierfs::{owner.url}/run", save=[train.Replay(ring="8MiB", level=level)], **tiers)

    with manager(owner) as run:
        for step in range(3):
            model(torch.ones(20)).sum().backward()
            state["optimizer"].step()
            run.step(step, state)
            run.wait()
    weights = model.weight.detach().clone()
    if level == "peer":
        fs, root = owner.open()
        fs.wait(root, "peer", timeout=WAIT_S)
        owner.lose()
    with manager(holder if level == "peer" else owner) as run:
        restored = run.restore(state)
    assert (restored.step, restored.replayed) == (2, 2)
    assert restored.level == "staged" if level == "staged" else restored.level in {"peer", "object"}
    assert torch.equal(model.weight, weights)


def test_a_lost_host_loses_nothing_that_reached_peer(hosts):
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    contents = {"shard0": content(1), "shard1": content(2, 5_000_000), "latest": b"shard1"}
    fs, root = save(owner, contents)
    assert fs.ack(f"{root}/run/shard0") == fs.ack(f"{root}/run/latest") == "peer"
    assert read_all(owner.url, contents) is None
    assert owner.status()["peers"]["hosts"][0]["held_files"] == len(contents)
    owner.lose()
    assert until(lambda: read_all(owner.url, contents), WAIT_S) == contents
    until(lambda: holder.status()["peers"]["holds_files"] == 0, WAIT_S)
    assert holder.status()["conflict_files"] == 0


def test_a_holder_forgets_what_the_object_tier_has(hosts):
    owner, holder = hosts("a"), hosts("b")
    fs, root = save(owner, {"x": content(3), "y": b"small"}, ack="staged")
    fs.wait(root, "peer", timeout=WAIT_S)
    fs.wait(root, "object", timeout=WAIT_S)
    until(lambda: holder.status()["peers"]["holds_files"] == 0, WAIT_S)


def test_a_restarted_owner_sends_nothing_twice(hosts):
    owner, _ = hosts("a", bandwidth=1), hosts("b")
    fs, root = save(owner, {"x": content(4)})
    assert owner.status()["counters"]["flusher_peer_sent_bytes"] == 300_000
    owner.kill()
    owner.start()
    until(lambda: fs.ack(f"{root}/run/x") == "peer", WAIT_S)
    assert owner.status()["counters"].get("flusher_peer_sent_bytes", 0) == 0


def test_chunks_that_the_holder_has_are_not_sent_again(hosts):
    owner, _ = hosts("a", bandwidth=1), hosts("b")
    save(owner, {"x": content(5), "again": content(5)})
    assert owner.status()["counters"]["flusher_peer_sent_bytes"] == 300_000


def test_an_owner_that_returns_after_adoption_finds_no_conflict(hosts):
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    contents = {"x": content(6), "y": content(7)}
    save(owner, contents)
    owner.kill()
    assert until(lambda: read_all(owner.url, contents), WAIT_S) == contents
    del owner.settings["bandwidth"]
    owner.start()
    until(lambda: owner.status()["queue_files"] == 0, WAIT_S)
    assert owner.status()["conflict_files"] == holder.status()["conflict_files"] == 0
    assert read_all(owner.url, contents) == contents


def test_two_holders_adopt_the_same_changes(hosts):
    owner, *holders = hosts("a", bandwidth=1, peers=2), hosts("b"), hosts("c")
    contents = {"x": content(8), "latest": b"x"}
    save(owner, contents)
    owner.lose()
    assert until(lambda: read_all(owner.url, contents), WAIT_S) == contents
    for holder in holders:
        until(lambda holder=holder: holder.status()["peers"]["holds_files"] == 0, WAIT_S)
        assert holder.status()["conflict_files"] == 0


def test_a_full_peer_leaves_the_level_and_the_way_to_the_bucket(hosts):
    owner, _ = hosts("a"), hosts("b", peer_ram="0", peer_nvme="1MiB")
    fs, root = save(owner, {"x": content(9, 4_000_000)}, ack="object")
    owner.kill()
    owner.settings["bandwidth"] = 1
    owner.start()
    fs.pipe_file(f"{root}/run/y", content(10, 4_000_000), ack="local")
    with pytest.raises(TimeoutError):
        fs.wait(f"{root}/run/y", "peer", timeout=3)
    assert fs.ack(f"{root}/run/y") == "local"
    assert owner.status()["counters"]["flusher_peer_full"] > 0


def test_a_killed_holder_still_holds_after_its_restart(hosts):
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    contents = {"x": content(11)}
    save(owner, contents)
    holder.kill()
    owner.lose()
    holder.start()
    assert until(lambda: read_all(owner.url, contents), WAIT_S) == contents


def test_strangers_and_rubbish_do_not_stop_a_holder(hosts, tmp_path):
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    address = tuple(holder.settings["peer_listen"].split(":"))
    for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", random.Random(12).randbytes(100_000)):
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(rubbish)
    fs, root = save(owner, {"x": content(13)})
    assert fs.ack(f"{root}/run/x") == "peer"


def test_a_holder_without_free_descriptors_waits_for_some(hosts):
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    [known] = until(lambda: owner.status()["peers"]["hosts"], WAIT_S)
    address = known["address"].split(":")
    used = [int(each) for each in os.listdir(f"/proc/{holder.pid}/fd")]
    before = resource.prlimit(holder.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, (max(used) + 1, before[1]))
    with contextlib.ExitStack() as ends:
        for _ in range(40):
            ends.enter_context(socket.create_connection((address[0], int(address[1]))))
        until(lambda: "Too many open files" in holder.log(), WAIT_S)
        time.sleep(1)
        assert holder.log().count("Too many open files") < 10
    resource.prlimit(holder.pid, resource.RLIMIT_NOFILE, before)
    fs, root = save(owner, {"x": content(8)}, ack="staged")
    fs.wait(root, "peer", timeout=WAIT_S)


def test_ack_peer_without_peers_is_refused(hosts, tmp_path):
    with pytest.raises(tierfs.TierfsError, match="peers="):
        PeerHost(tmp_path, "alone", f"file://{tmp_path}/store", 1, peers=0).open(ack="peer")[0].ls(f"{tmp_path}/store")


def test_a_host_does_not_forget_what_it_holds_for_others(hosts, tmp_path):
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    save(owner, {"x": content(14)})
    holder.kill()
    store = next(each for each in local_stores(holder.state))
    with pytest.raises(StoreError, match="of other hosts"):
        forget(holder.state, store, dry_run=False)


def test_an_address_of_another_host_is_shown_and_stops_nothing(hosts):
    owner = hosts("a", peer_listen="192.0.2.1:7946")
    fs, root = owner.open(ack="object")
    fs.pipe_file(f"{root}/run/x", content(15))
    assert "192.0.2.1" in owner.status()["peer_problem"]


def test_two_stores_of_a_host_share_its_port(hosts, tmp_path):
    first = hosts("a")
    second = hosts("b", peer_listen=first.settings["peer_listen"])
    fs, root = save(first, {"x": content(16)}, ack="staged")
    fs.wait(f"{root}/run/x", "peer", timeout=WAIT_S)
    assert "is in use" in second.log()


def test_a_host_with_another_certificate_is_refused(hosts, tmp_path):
    holder = hosts("b")
    (tmp_path / "stranger").mkdir()
    stranger = Identity(tmp_path / "stranger")
    records = until(lambda: list(tmp_path.glob("store/.tierfs/peers/*")), WAIT_S)
    record = PeerRecord.decode(records[0].read_bytes(), "a record")
    context = stranger.context([record.certificate], server=False)
    with (
        pytest.raises(OSError, match=r"unknown ca|closed|reset|EOF"),
        contextlib.closing(dial(record.address, record.port, context, 10)) as connection,
    ):
        connection.ask({"do": "list", "after": 0})
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        dial(record.address, record.port, stranger.context([stranger.certificate], server=False), 10)
    assert holder.status()["peers"]["holds_files"] == 0


@pytest.mark.parametrize("later", ["replaced", "removed"])
def test_a_change_that_its_owner_has_replaced_is_no_conflict(hosts, later):
    """The holder was away when the owner published that change, and then the next one of the same path."""
    owner, holder = hosts("a", bandwidth=1), hosts("b")
    fs, root = save(owner, {"x": content(17)})
    holder.kill()
    owner.kill()
    del owner.settings["bandwidth"]
    owner.start()
    fs.wait(f"{root}/run/x", "object", timeout=WAIT_S)
    if later == "replaced":
        fs.pipe_file(f"{root}/run/x", content(18), ack="object")
    else:
        fs.rm_file(f"{root}/run/x")
    owner.lose()
    holder.start()
    until(lambda: holder.status()["peers"]["holds_files"] == 0, WAIT_S)
    assert holder.status()["conflict_files"] == 0
    there, store = bare(owner.url)
    assert there.exists(f"{store}/run/x") == (later == "replaced")
    assert later == "removed" or there.cat_file(f"{store}/run/x") == content(18)


def test_another_change_of_this_host_is_a_conflict_with_peers(hosts, tmp_path):
    """The record is of this host and has the later time, but it is not known to be based on the pending change."""
    host = hosts("a")
    save(host, {"x": content(19)}, ack="object")
    host.kill()
    host.settings["bandwidth"] = 1
    fs, root = save(host.start(), {"x": content(20)}, ack="local")
    file = tmp_path / "store" / record_key("run/x")
    record = decode_record(file.read_bytes(), "run/x", "x")
    other = replace(record, write_id=bytes(8) + record.write_id[8:], modified_ns=time.time_ns())
    (tmp_path / "new").write_bytes(other.encode("run/x"))
    os.replace(tmp_path / "new", file)
    host.kill()
    del host.settings["bandwidth"]
    host.start()
    with pytest.raises(ConflictError):
        fs.wait(f"{root}/run/x", "object", timeout=WAIT_S)
    assert [each["path"] for each in host.status()["conflicts"]] == ["run/x"]


def test_a_program_starts_a_flusher_that_has_peers(hosts):
    owner, _ = hosts("a"), hosts("b")
    owner.kill()
    fs, root = save(owner, {"x": content(19)})
    assert fs.ack(f"{root}/run/x") in {"peer", "object"}


def held(hosts, contents, **settings):
    """Make an owner and a holder that publish nothing, and lose the owner. Return the holder."""
    owner, holder = hosts("a", bandwidth=1, **settings), hosts("b", bandwidth=1)
    save(owner, contents)
    owner.lose()
    return holder


def test_a_host_reads_what_others_hold_before_it_is_published(hosts):
    contents = {"shard0": content(1), "shard1": content(2, 5_000_000), "latest": b"shard1"}
    holder = held(hosts, contents)
    for host in (holder, hosts("c", bandwidth=1)):
        fs, root = host.open()
        assert sorted(fs.ls(f"{root}/run", detail=False)) == sorted(f"{root}/run/{name}" for name in contents)
        assert {name: fs.cat_file(f"{root}/run/{name}") for name in contents} == contents
        assert fs.cat_file(f"{root}/run/shard1", start=1_500_000, end=1_500_010) == contents["shard1"][1_500_000:][:10]
        assert fs.ack(f"{root}/run/shard0") == "peer"
        assert fs.status(root)["counters"]["process_peer_read_bytes"] >= 5_300_000


def test_a_held_change_is_not_read_over_a_newer_file(hosts):
    holder = held(hosts, {"x": content(17), "y": content(18)})
    other, store = bare(holder.url)
    other.pipe_file(f"{store}/run/x", b"newer")
    fs, root = holder.open()
    assert fs.cat_file(f"{root}/run/x") == b"newer"
    assert fs.cat_file(f"{root}/run/y") == content(18)
    assert fs.ack(f"{root}/run/x") == "object"


def test_a_held_removal_hides_the_published_file(hosts):
    owner, holder = hosts("a"), hosts("b", bandwidth=1)
    fs, root = save(owner, {"x": content(19), "y": b"y"}, ack="object")
    owner.kill()
    owner.settings["bandwidth"] = 1
    owner.start()
    save(owner, {"z": content(20)})
    fs, root = owner.open(ack="peer")
    fs.rm_file(f"{root}/run/x")
    owner.lose()
    fs, root = holder.open()
    assert [path.rpartition("/")[2] for path in fs.ls(f"{root}/run", detail=False)] == ["y", "z"]


def test_a_damaged_held_copy_is_set_aside_and_another_one_is_read(hosts):
    owner, *holders = hosts("a", bandwidth=1, peers=2), hosts("b", bandwidth=1), hosts("c", bandwidth=1)
    contents = {"x": content(21, 3_000_000)}
    save(owner, contents)
    until(lambda: holders[0].status()["peers"]["live"] == 2, WAIT_S)
    files = Host(holders[0].state).segments.glob("peers-*/**/*")
    (file,) = [file for file in files if file.is_file() and file.stat().st_size > 3_000_000]
    with file.open("r+b") as stream:
        stream.seek(2_000_000)
        stream.write(b"damage")
    fs, root = holders[0].open()  # asks itself first
    assert fs.cat_file(f"{root}/run/x") == contents["x"]
    assert "a damaged copy is quarantined" in holders[0].log()
    until(lambda: owner.status()["peers"]["hosts"] and sent_again(owner), WAIT_S)


def sent_again(owner):
    return owner.status()["counters"]["flusher_peer_sent_bytes"] > 2 * 3_000_000


def test_a_read_waits_only_briefly_for_a_host_that_hangs(hosts):
    owner, *holders = hosts("a", bandwidth=1, peers=2), hosts("b", bandwidth=1), hosts("c", bandwidth=1)
    contents = {f"x{number}": content(number, 100_000) for number in range(20)}
    save(owner, contents)
    owner.lose()
    reader = hosts("d", bandwidth=1)
    fs, root = reader.open()
    assert fs.cat_file(f"{root}/run/x0") == contents["x0"]
    holders[0].signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        assert {name: fs.cat_file(f"{root}/run/{name}") for name in contents} == contents
        assert time.monotonic() - begin < WAIT_S
    finally:
        holders[0].signal(signal.SIGCONT)


@pytest.mark.parametrize("hosts", [60], indirect=True, ids=["lease_60_s"])
def test_a_file_whose_holders_are_away_is_not_called_damaged(hosts):
    holder, reader = held(hosts, {"x": content(27)}), hosts("c", bandwidth=1)
    fs, root = reader.open()
    assert fs.cat_file(f"{root}/run/x") == content(27)
    holder.kill()
    with pytest.raises(StoreError, match="do not answer"):
        fs.cat_file(f"{root}/run/x")
    holder.start()
    assert until(lambda: read_held(fs, f"{root}/run/x"), WAIT_S) == content(27)


def read_held(fs, path):
    with contextlib.suppress(StoreError):
        return fs.cat_file(path)


def test_hosts_are_found_at_given_addresses(hosts):
    holder, other = hosts("b", bandwidth=1), hosts("c")
    owner = hosts("a", bandwidth=1, peer_hosts=f"127.0.0.1:1,{holder.settings['peer_listen']}")
    fs, root = save(owner, {"x": content(25)})
    assert fs.status(root)["peers"]["live"] == 1
    assert until(lambda: holder.status()["peers"]["holds_files"] == 1, WAIT_S)
    owner.lose()
    until(lambda: read_all(other.url, ["x"]) or holder.status()["peers"]["holds_for"], WAIT_S)
    fs, root = other.open()
    assert fs.cat_file(f"{root}/run/x") == content(25)


def test_doctor_tries_each_other_host(hosts):
    one, two = hosts("a"), hosts("b")
    settings = {"state_dir": one.state, **one.settings}
    names = ("state_dir", "peers", "peer_listen", "ram", "nvme")
    environment = {**os.environ, **{f"TIERFS_{name.upper()}": str(settings[name]) for name in names}}
    until(lambda: one.status()["peers"]["live"] == 1, WAIT_S)

    def checked():
        command = [sys.executable, "-m", "tierfs.cli", "doctor", f"tierfs::{one.url}", "--json"]
        out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False).stdout
        return [each for each in json.loads(out)["checks"] if each["name"].startswith("peer")]

    assert [each["state"] for each in checked()] == ["ok"]
    two.signal(signal.SIGKILL)
    (check,) = checked()
    assert check["state"] == "problem"
    assert "refused" in check["found"]
    assert "firewall" in check["advice"]


def test_reads_do_not_wait_for_a_list_that_cannot_be_made(hosts, tmp_path):
    host = hosts("a", peer_listen="192.0.2.1:7946")
    fs, root = host.open(ack="object")
    fs.pipe_file(f"{root}/run/x", content(26))
    begin = time.monotonic()
    for _ in range(20):
        assert fs.cat_file(f"{root}/run/x") == content(26)
    assert time.monotonic() - begin < WAIT_S
    assert fs.status(root)["counters"]["process_peers_unlisted"] == 1
