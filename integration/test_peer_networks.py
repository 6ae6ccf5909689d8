"""Hosts in network namespaces hold each other's changes while links, clocks and hosts fail."""

import contextlib
import random
import time

import pytest
from peer_cluster import LEASE_S, WAIT_S, Cluster, can_cut, filesystem, until

import tierfs
from tierfs.testing import PlannedTcpFault, TcpFault

pytest.importorskip("cryptography")
pytestmark = pytest.mark.skipif(not can_cut(), reason="network namespaces need root")
HOUR_S = 3600.0
SIDES = {"request": 2_000_000, "response": 5000}  # bytes that a connection carries before a fault


def content(path, size=300_000):
    return random.Random(str(path)).randbytes(size)


def save(url, settings, contents, level="peer"):
    """Write files in this order, each at a level. Return the seconds that each took, and the level it has now."""
    fs, root = filesystem(url, settings)
    took = []
    for path, data in contents.items():
        begin = time.monotonic()
        fs.pipe_file(f"{root}/{path}", data, ack=level)
        took.append((time.monotonic() - begin, fs.ack(f"{root}/{path}")))
    return took


def wait(url, settings, path, level, timeout):
    fs, root = filesystem(url, settings)
    begin = time.monotonic()
    fs.wait(f"{root}/{path}", level, timeout=timeout)
    return time.monotonic() - begin


def read(url, settings, paths):
    fs, root = filesystem(url, settings)
    return {path: fs.cat_file(f"{root}/{path}") for path in paths if fs.exists(f"{root}/{path}")}


@contextlib.contextmanager
def cluster_at(tmp_path, url, **settings):
    tierfs.init(url, lease_s=LEASE_S)
    with Cluster(tmp_path, url, **settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "bare"))
    with cluster_at(tmp_path, f"file://{tmp_path}/store") as cluster:
        yield cluster


def start(cluster, *names, **settings):
    """Start hosts that know each other. ``slow`` are names of those that bring nothing to the object tier."""
    hosts = [cluster.host(name, **settings).start() for name in names]
    for host in hosts:
        until(lambda host=host: host.status().get("peers", {}).get("live") == len(hosts) - 1, WAIT_S)
    return hosts


def in_bucket(cluster, host, contents):
    """Wait until the object tier has these files, as a process without local tiers sees them."""
    bare = {"ram": "0", "nvme": "0", "state_dir": f"{cluster.base}/bare-{host.number}"}
    program = host.program()
    until(lambda: set(program.run(read, cluster.url, bare, list(contents))) == set(contents), WAIT_S)
    assert program.run(read, cluster.url, bare, list(contents)) == contents


def settled(*hosts):
    for host in hosts:
        until(lambda host=host: not host.status()["peers"]["holds_files"], WAIT_S)
        until(lambda host=host: not host.status()["queue_files"], WAIT_S)
        assert host.status()["conflict_files"] == 0


@pytest.mark.parametrize("losses", [1, 2])
def test_silent_hosts_lose_nothing_that_reached_peer(cluster, losses):
    hosts = start(cluster, "a", "b", "c", peers=2, bandwidth=1)
    contents = {f"run/{number}": content(number, 2_000_000) for number in range(3)} | {"run/latest": b"2"}
    assert {level for _, level in hosts[0].run(save, cluster.url, hosts[0].options, contents)} == {"peer"}
    for host in hosts[1:]:
        host.kill()
        del host.settings["bandwidth"]
        host.start()
    for host in hosts[:losses]:
        host.remove()
    in_bucket(cluster, hosts[-1], contents)
    settled(*hosts[losses:])


def test_another_host_is_asked_when_answers_get_lost(cluster):
    a, *others = start(cluster, "a", "b", "c", bandwidth=1)
    a.run(save, cluster.url, a.options, {"run/before": content(0)})
    [chosen] = [host["address"].split(":")[0] for host in a.status()["peers"]["hosts"]]
    holder, other = sorted(others, key=lambda host: host.address != chosen)
    cluster.half_cut(holder, a)
    [(seconds, _)] = a.run(save, cluster.url, a.options, {"run/x": content(1)}, "staged")
    assert seconds < 5
    print("replaced after", a.run(wait, cluster.url, a.options, "run/x", "peer", WAIT_S), "s")
    assert other.status()["peers"]["holds_files"]
    cluster.heal(holder)
    for host in (a, holder, other):
        host.kill()
        del host.settings["bandwidth"]
        host.start()
    in_bucket(cluster, other, {"run/before": content(0), "run/x": content(1)})
    settled(a, holder, other)


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_and_dropped_bytes_between_hosts_harm_nothing(cluster, seed):
    a, b = start(cluster, "a", "b", bandwidth=1)
    noise = random.Random(seed)
    places = {side: [30, 2000, *(noise.randrange(size) for _ in range(9))] for side, size in SIDES.items()}
    kinds = (TcpFault.BIT_FLIP, TcpFault.RESET)
    faults = [PlannedTcpFault(kind, side, at) for kind in kinds for side in SIDES for at in places[side]]
    proxies = [cluster.lead_through_proxy(a, b), cluster.lead_through_proxy(b, a)]
    a.kill()  # its connections are older
    a.start()
    for proxy in proxies:
        proxy.random, proxy.probability = faults, 0.9
    contents = {}
    while sum(len(proxy.fired) for proxy in proxies) < 6:
        some = {f"run/{len(contents)}": content(noise.random(), noise.choice([500, 300_000, 3_000_000]))}
        a.run(save, cluster.url, a.options, some)
        contents |= some
    b.kill()
    del b.settings["bandwidth"]
    b.start()
    a.remove()
    in_bucket(cluster, b, contents)
    settled(b)


def test_clocks_that_differ_by_hours_change_nothing(cluster):
    made = [cluster.host(name, peers=2) for name in ("a", "b", "c")]
    for host, skew_s in zip(made, (5 * HOUR_S, -3 * HOUR_S, 0), strict=True):
        host.skew_s = skew_s
        host.start()
    a, b, c = made
    until(lambda: all(host.status()["peers"]["live"] == 2 for host in made), WAIT_S)
    a.kill()
    a.settings["bandwidth"] = 1
    a.start()
    contents = {f"run/{number}": content(number) for number in range(3)}
    for _ in range(3):
        a.run(save, cluster.url, a.options, contents)
        time.sleep(LEASE_S)
    assert not b.status()["counters"].get("flusher_adopted_files")
    assert not c.status()["counters"].get("flusher_adopted_files")
    a.kill()
    in_bucket(cluster, c, contents)
    del a.settings["bandwidth"]
    a.start()
    settled(a, b, c)


def test_a_full_host_is_passed_over(cluster):
    a = cluster.host("a", bandwidth=1).start()
    for name, room in (("b", "2MiB"), ("c", "64MiB")):
        cluster.host(name, peer_ram="0", peer_nvme=room).start()
    contents = {f"run/{number}": content(number, 3_000_000) for number in range(4)}
    a.run(save, cluster.url, a.options, contents)
    assert a.status()["queue_files"] == 4
    a.remove()
    in_bucket(cluster, cluster.hosts["c"], contents)
    settled(cluster.hosts["b"], cluster.hosts["c"])


def test_an_isolated_owner_returns_after_two_hosts_adopted(tmp_path, s3_of_environment):
    """It goes on to write the same paths meanwhile, and loses the bucket as well as its peers."""
    s3, proxy = s3_of_environment
    with contextlib.ExitStack() as ends:
        cluster = ends.enter_context(cluster_at(tmp_path, f"s3://{s3.new_root()}", bucket_port=proxy.port))
        a, b, c = start(cluster, "a", "b", "c", peers=2)
        a.bucket.fail(PlannedTcpFault(TcpFault.UNAVAILABLE, side="request", aim=lambda method, _: method == "PUT"))
        first = {f"run/{number}": content(number) for number in range(3)} | {"run/latest": b"first"}
        a.run(save, cluster.url, a.options, first)
        cluster.cut(a)
        a.bucket.recover()
        a.bucket.refuse = True
        in_bucket(cluster, b, first)
        settled(b, c)
        later = {"run/0": content("later"), "run/3": content(3), "run/latest": b"later"}
        a.run(save, cluster.url, a.options, later, "staged")
        cluster.heal(a)
        a.bucket.refuse = False
        settled(a, b, c)
        in_bucket(cluster, c, {**first, **later})
        assert sum(host.status()["counters"].get("flusher_adopted_files", 0) for host in (b, c)) >= len(first)


@pytest.mark.parametrize("bandwidth", ["1", "0"])
def test_a_holder_keeps_to_its_budget(cluster, bandwidth):
    """Three owners send four times as much: what the budget refuses, or what the object tier gets soon."""
    budget, rest = 64 << 20, 64 << 20
    sizes = {"ram": "192MiB", "nvme": "0", "peer_ram": "0", "peer_nvme": "0", "bandwidth": bandwidth}
    holder = cluster.host("holder", ram="32MiB", nvme="0", peer_ram=budget, peer_nvme="0").start()
    owners = [cluster.host(name, peer_domain="owners", **sizes).start() for name in "abc"]
    for host in (holder, *owners):
        until(lambda host=host: host.status()["peers"]["live"] == 3, WAIT_S)
        if host is not holder:
            cluster.lead_through_proxy(host, holder).bandwidth = 8e6  # so that all streams carry bytes at the same time
            host.kill()
            host.start()
    idle, most = holder.memory_bytes(), []
    for owner in owners:
        contents = {f"{owner.number}/{number}": content(f"{owner.number} {number}", 44 << 20) for number in range(2)}
        owner.program().begin(save, cluster.url, owner.options, contents, "staged")
    counter, least = ("flusher_peer_full", 3) if bandwidth == "1" else ("flusher_published_files", 2)

    def is_over():
        most.append(holder.memory_bytes())
        return all(owner.status()["counters"].get(counter, 0) >= least for owner in owners)

    until(is_over, WAIT_S)
    print(f"{(max(most) - idle) / (1 << 20):.0f} MiB more than when it was idle, {len(most)} looks")
    assert max(most) - idle <= budget + rest
