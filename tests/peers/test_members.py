"""Which hosts count as live, and which of them are chosen."""

from pathlib import Path

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import CorruptionError, FormatError, InvalidInputError
from tierfs.format.lease import PeerRecord
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.peers.members import Members, peer_key
from tierfs.peers.settings import Identity, PeerSettings, parse_listen

pytest.importorskip("cryptography")
LEASE_S = 60


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    made = []
    for _ in range(6):
        made.append(Identity(tmp_path_factory.mktemp("host")))
    return made


class World:
    def __init__(self, directory, identities, domains, count=1):
        self.objects, self.clock = MemoryObjects(str(directory)), ManualClock()
        self.hosts = [
            Members(identity, PeerSettings(count, "127.0.0.1", domain=domain), self.clock)
            for identity, domain in zip(identities, domains, strict=False)
        ]

    def look(self, host, seconds):
        """Let a host look at the others as often as in use, for this time."""
        for _ in range(4 * seconds // LEASE_S):
            self.clock.sleep(LEASE_S / 4)
            self.refresh(host)

    def refresh(self, *hosts):
        for host in hosts or self.hosts:
            host.refresh(self.objects, 7946, LEASE_S)


@pytest.fixture
def world(tmp_path, identities):
    def make(*domains, count=1):
        made = World(tmp_path, identities, domains, count)
        made.refresh()
        made.refresh()
        return made

    return make


def test_a_host_is_gone_when_its_record_does_not_change(world):
    made = world("", "")
    first, second = made.hosts
    made.refresh(first)
    made.look(first, LEASE_S * 3 // 4)
    assert not first.is_gone(second.me)
    made.look(first, LEASE_S // 4)
    assert first.is_gone(second.me)
    assert not first.live()
    made.refresh(second, first)
    assert not first.is_gone(second.me)
    assert set(first.live()) == {second.me}


def test_no_host_is_gone_before_the_first_look(world):
    made = world("")
    assert not Members(made.hosts[0]._identity, made.hosts[0]._settings, made.clock).is_gone("ab" * 16)


def test_a_host_that_left_is_gone_at_once(world):
    first, second = (made := world("", "")).hosts
    second.leave(made.objects)
    made.refresh(first)
    assert first.is_gone(second.me)


def test_holders_are_of_other_domains_and_of_different_ones(world):
    made = world("a", "a", "b", "b", "c", count=2)
    domains = {host.me: host._settings.domain for host in made.hosts}
    for host in made.hosts:
        chosen = [domains[each] for each in host.chosen()]
        assert len(set(chosen)) == 2
        assert domains[host.me] not in chosen


def test_a_host_that_comes_moves_only_its_own_choices(world, identities):
    made = world("", "", "", "", "")
    before = {host.me: set(host.chosen()) for host in made.hosts}
    new = Members(identities[5], PeerSettings(1, "127.0.0.1"), made.clock)
    made.hosts.append(new)
    made.refresh()
    made.refresh()
    for host in made.hosts[:-1]:
        assert set(host.chosen()) in ({*before[host.me]}, {new.me})


def test_a_host_that_failed_rests_longer_each_time(world):
    made = world("", "")
    first, second = made.hosts
    first.rest(second.me)
    assert not first.chosen()
    made.clock.sleep(1.5)
    assert first.chosen()
    first.rest(second.me)
    made.clock.sleep(1.5)
    assert not first.chosen()
    first.end_rest(second.me)
    assert first.chosen()


@pytest.mark.parametrize("damage", [b"", b"rubbish", b"\x89TIERFS\n" + bytes(100)])
def test_a_damaged_record_is_passed_over(world, damage):
    made = world("", "")
    first, second = made.hosts
    made.objects.put(peer_key(second.me), [damage])
    made.look(first, 2 * LEASE_S)
    assert not first.live()


def test_a_record_under_another_id_is_passed_over(world):
    made = world("", "")
    first, second = made.hosts
    data, _ = made.objects.read(peer_key(second.me), 8192)
    made.objects.put(peer_key("ab" * 16), [data])
    made.refresh(first)
    assert set(first.live()) == {second.me}
    assert set(first.unreadable) == {"ab" * 16}


@pytest.mark.parametrize("certificate", [b"", b"certificate", "cut", "with more behind it"])
def test_an_unreadable_certificate_is_left_out_and_counted(world, certificate):
    made = world("", "")
    first, second = made.hosts
    if isinstance(certificate, str):
        whole = first._identity.certificate
        certificate = whole[:-1] if certificate == "cut" else whole + b"rubbish"
    record = PeerRecord(1, LEASE_S, "127.0.0.1", 7946, "", "host", certificate)
    made.objects.put(peer_key(record.id), [record.encode()])
    made.refresh(first)
    assert set(first.live()) == {second.me}
    assert set(first.unreadable) == {record.id}
    made.objects.delete([peer_key(record.id)])
    made.refresh(first)
    assert not first.unreadable


def test_a_record_is_read_as_written_and_damage_is_found():
    record = PeerRecord(7, 60, "fe80::1", 65535, "rack", "höst", b"certificate")
    data = record.encode()
    assert PeerRecord.decode(data, "x") == record
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 4
        with pytest.raises((CorruptionError, FormatError)):
            PeerRecord.decode(bytes(changed), "x")


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1", ("10.0.0.1", 7946)), ("node7:80", ("node7", 80)), ("[fe80::1]:99", ("fe80::1", 99))],
)
def test_an_address_to_listen_at(text, address):
    assert parse_listen(text) == address


@pytest.mark.parametrize("text", ["", "0.0.0.0", "[::]:7946", "*", "a:b", "host:70000", "fe80::1", ":7946"])
def test_an_address_that_is_refused(text):
    with pytest.raises(InvalidInputError):
        parse_listen(text)


def test_a_host_keeps_its_identity(tmp_path):
    first = Identity(tmp_path)
    assert Identity(tmp_path).id == first.id
    assert (tmp_path / "peer.pem").stat().st_mode & 0o777 == 0o600


def test_the_golden_record_is_read_and_written_again():
    data = (Path(__file__).parents[1] / "golden" / "v1" / "peer").read_bytes()
    record = PeerRecord.decode(data, "golden")
    assert record == PeerRecord(7, 60, "10.0.0.17", 7946, "rack-4", "node17", bytes(range(64)))
    assert record.encode() == data
    assert record.id == "fdeab9acf3710362bd2658cdc9a29e8f"


def test_an_outage_of_the_object_tier_makes_no_host_gone(world):
    made = world("", "")
    first, second = made.hosts
    made.refresh(first)
    made.clock.sleep(10 * LEASE_S)
    assert set(first.chosen()) == {second.me}
    made.refresh(first)  # the other host could not renew its record either
    assert not first.is_gone(second.me)
    made.look(first, LEASE_S)
    assert first.is_gone(second.me)


def test_a_host_that_did_not_answer_may_have_another_port(world):
    made = world("", "")
    first, second = made.hosts
    first.rest(second.me)
    second.refresh(made.objects, 8000, LEASE_S)
    made.refresh(first)
    assert first.live()[second.me].port == 8000
