"""Replication to other hosts, as the core knows it: see `tierfs.satellites`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.errors import InvalidInputError
from tierfs.host.slab.memory import memory_limit
from tierfs.peers.settings import PEERS_MAX, PeerSettings, parse_hosts, parse_listen
from tierfs.session.settings import TierOptions, size_of

if TYPE_CHECKING:
    from tierfs.clock import Clock
    from tierfs.flusher.state import FlushState
    from tierfs.host.events import Counters
    from tierfs.host.host import Host
    from tierfs.host.rpc.client import FlusherClient
    from tierfs.peers.peering import Peering
    from tierfs.peers.reads import PeerReader

PEER_SHARE = "10%"


class PeerReplication(PeerSettings):
    """Replication with these settings: a `Replication`."""

    def remote(
        self, directory: Path, store: str, flusher: FlusherClient, counters: Counters, clock: Clock, *, is_near: bool
    ) -> PeerReader:
        from tierfs.peers.reads import PeerReader  # noqa: PLC0415 - the flusher needs the other half

        reads_once = self.reads_once and not is_near
        return PeerReader(directory, store, flusher, counters, clock, reads_once=reads_once)

    def exchange(self, state: FlushState, host: Host, store: str) -> Peering:
        from tierfs.peers.peering import Peering  # noqa: PLC0415 - loads the object tier, which readers do not need here

        return Peering(state, self, host, store)


def replication_of(options: TierOptions, free_bytes: int) -> PeerReplication:
    """Return the settings of replication to other hosts, of which ``peers`` is given.

    ``free_bytes`` are those of the disk of the state directory.

    Raises:
        InvalidInputError: A value is invalid, or there is no address to listen at.
    """
    try:
        count = int(str(options.peers))
    except ValueError:
        count = -1
    if not 1 <= count <= PEERS_MAX:
        raise InvalidInputError(f"peers={options.peers!r} is not a number from 0 to {PEERS_MAX}")
    if not options.peer_listen:
        raise InvalidInputError(
            f"peers={count} needs the address at which this host listens: set peer_listen= (TIERFS_PEER_LISTEN)"
        )
    address, port = parse_listen(options.peer_listen)
    given = (options.peer_ram, options.peer_nvme)
    ram, nvme = (PEER_SHARE if value is None else value for value in given)
    return PeerReplication(
        count,
        address,
        port,
        options.peer_domain or "",
        size_of("peer_ram", ram, memory_limit()),
        size_of("peer_nvme", nvme, free_bytes),
        size_of("peer_bandwidth", options.peer_bandwidth or 0),
        hosts=parse_hosts(options.peer_hosts or ""),
        reads_once=str(options.peer_share or 0) != "0",
    )
