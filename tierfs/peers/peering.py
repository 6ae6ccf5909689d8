"""Exchange drafts with other hosts: send this host's, and bring those of a lost host to the object tier.

Each chosen host has a thread that sends it the pending drafts in closing order. A draft is only sent after all earlier
ones that are still pending. So a host that adopts them can publish them in that order.
A draft has reached ``peer`` when as many hosts as were asked for have answered that they hold it.

A host whose record has run out is lost. Every host that holds its drafts adopts them: they join the queue of the
adopter, which uploads and publishes them like its own. The draft's write id makes several adopters and a returning
owner safe: the second of them finds the record there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.checked_json import parse_object
from tierfs.clock import Pace, boot_id
from tierfs.digest import DigestKind
from tierfs.errors import CapacityError, CorruptionError, TierfsError
from tierfs.flusher.queue import FlushItem, FlushStage
from tierfs.flusher.state import FlushState
from tierfs.host.local_state import lent_places
from tierfs.host.name_locks import NameLocks
from tierfs.host.pending.levels import Level
from tierfs.peers.client import PeerClient
from tierfs.peers.members import Members
from tierfs.peers.room import HeldDraft, PeerRoom
from tierfs.peers.server import PeerServer
from tierfs.peers.settings import Identity, PeerSettings
from tierfs.store.read.fetch import fetch
from tierfs.threads import start_daemon

if TYPE_CHECKING:
    from tierfs.format.lease import PeerRecord
    from tierfs.format.manifest import Row
    from tierfs.host.host import Host
    from tierfs.store.store import Store

RENEWALS = 4
"""Renewals of the record in the time for which it counts."""
PAUSE_S = 0.5
LIST_S = 5.0
"""How long a process of this host waits for the list of hosts."""
SWEEP_S = 1.0
BRINGS_MAX = 4
"""Chunks that are fetched at a time for other hosts. Each takes a buffer of its size."""
COMPARE_S = 5.0
"""How often a host is asked what it holds, while nothing is sent to it."""
_logger = logging.getLogger("tierfs.peers")


class Peering:
    """This host's part in the exchange: a `DraftExchange`.

    Args:
        state: Shared by the flusher's parts.
        settings: What this host asks of its peers, and gives to them.
        store: The store's uuid.

    Raises:
        InvalidInputError: The package ``cryptography`` is not installed.
        StoreError, ReadOnlyError, CapacityError: The address or a directory cannot be used.
    """

    def __init__(self, state: FlushState, settings: PeerSettings, host: Host, store: str) -> None:
        self._state = state
        self._settings = settings
        self._store = store
        self._boot = boot_id()
        directory = host.store_directory(store)
        self._identity = Identity(directory)
        places = zip(lent_places(host, store), (settings.ram_bytes, settings.nvme_bytes), strict=True)
        self.room = PeerRoom(list(places), directory / "peers.published", state.clock, state.fault)
        self.members = Members(self._identity, settings, state.clock)
        self._pace = Pace(state.clock, settings.bandwidth)
        self._server = PeerServer(
            self._identity,
            settings,
            store,
            self.room,
            self.members,
            sources=partial(state.sources, slots={}),
            bring=self._bring,
            adopt=self._note_lost,
            greet=self._ask_again,
        )
        self._brought = NameLocks(directory / "peers.fetch")
        self._bringing = threading.Semaphore(BRINGS_MAX)
        self._again = threading.Event()  # set when the thread below has something to do
        self._wants_list = False  # whether the list of hosts has to be read at once
        self._gone_file = directory / "peers.gone"
        self._gone = self._read_gone()  # write ids that a host was not told to drop yet, by its id; under the lock
        # Hosts that may hold a draft that this process does not know to be there. Under the lock, too.
        self._unsure = set(self._gone)
        self._lost: set[bytes] = set()  # write ids that their living owners do not have any more
        self._senders: dict[str, threading.Thread] = {}
        self._clients: dict[str, PeerClient] = {}
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Peering({self.members!r}, {self.room!r})"

    def start(self) -> None:
        self._server.start()
        self._thread = threading.Thread(target=self._keep_members, name="tierfs-members", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._again.set()
        self._pace.stop()
        self._server.stop()
        if self._thread is not None:
            self._thread.join()
        for client in list(self._clients.values()):
            client.hang_up()
        for thread in list(self._senders.values()):
            thread.join()
        if not len(self.room) and not len(self._state.entries):
            # Nobody depends on this host, so the others need not wait until its record runs out.
            with contextlib.suppress(TierfsError):
                self._state.access.call(lambda publisher: self.members.leave(publisher.store().objects))

    def hosts(self) -> dict[str, Any]:
        self.members.is_listed.wait(LIST_S)
        return {"live": len(self.members.live())}

    def is_busy(self) -> bool:
        return bool(len(self.room) or any(self._gone.get(host) for host in list(self._senders)))

    def report(self) -> dict[str, Any]:
        usages = [tier.usage() for tier in self.room.tiers]
        chosen = self.members.chosen()
        return {
            "id": self.members.me,
            "wanted": self._settings.count,
            "live": len(self.members.live()),
            "unreadable": len(self.members.unreadable),
            "hosts": [
                {
                    "id": host,
                    "host": record.host,
                    "address": f"{record.address}:{record.port}",
                    "domain": record.domain,
                    "held_files": sum(host in entry.holders for entry in self._state.entries),
                    "connected": host in self._clients,
                }
                for host, record in chosen.items()
            ],
            "holds_files": len(self.room),
            "holds_bytes": sum(usage.dirty_bytes for usage in usages),
            "budget_bytes": sum(usage.budget_bytes for usage in usages),
            "holds_for": sorted(self.room.owners()),
        }

    # -- membership ----------------------------------------------------------------------------------------------------

    def _keep_members(self) -> None:
        state, next_s = self._state, float("-inf")
        while not state.stopping:
            try:
                if state.access.is_known and (self._wants_list or state.clock.monotonic() >= next_s):
                    self._wants_list, next_s = False, state.clock.monotonic() + PAUSE_S
                    store = state.access.call(lambda publisher: publisher.store())
                    if store.descriptor.single_writer:
                        text = "%s has a single writer, so its hosts cannot hold each other's changes"
                        self._warn("single", text, store.url)
                        self.members.is_listed.set()
                    else:
                        self._refresh(store)
                    next_s = state.clock.monotonic() + store.descriptor.lease_s / RENEWALS
            except Exception as error:  # noqa: BLE001 - the thread must go on: no other one renews the record
                state.counters["peer_list_failures"] += 1
                self.members.is_listed.set()  # those who wait learn that there is no list
                self._warn("list", "the list of peers cannot be renewed; those known so far stay: %s", error)
            self._start_senders()
            self._again.wait(PAUSE_S)
            if self._again.is_set() and not state.stopping:
                state.clock.sleep(PAUSE_S)  # so that a stranger that connects again and again costs little
            self._again.clear()

    def _refresh(self, store: Store) -> None:
        owners = self.room.owners()
        self.members.refresh(store.objects, self._server.port, store.descriptor.lease_s, owners)
        self._warned.discard("list")
        for name, problem in self.members.unreadable.items():
            self._warn(
                f"record {name}", "the record of the peer %s is left out, as it cannot be read: %s", name, problem
            )
        self._lost &= {held.draft.write_id for held in self.room.held()}
        self.room.forget_hosts(self.members.knows)
        for owner in owners:
            is_gone = self.members.is_gone(owner)
            for held in self.room.held(owner):
                if (is_gone or held.draft.write_id in self._lost) and not held.is_conflict:
                    self._adopt(held)

    def _adopt(self, held: HeldDraft) -> None:
        """Put another host's draft into the queue."""
        state = self._state
        slots = (None,) * len(held.draft.slots)
        draft = replace(held.draft, slots=slots)
        with state.changed:
            if draft.write_id in state.entries:
                return
            turn = draft.turn(self._boot, held.seq)
            entry = FlushItem(draft, turn, level=Level.PEER, is_foreign=True, stage=FlushStage.READY)
            state.entries.add(entry)
            state.counters["adopted_files"] += 1
            state.changed.notify_all()
        _logger.warning("%s is adopted from a lost host, and goes to the object tier from here", draft.path)

    def may_publish(self, entry: FlushItem) -> bool:
        owner = self.room.owner_of(entry.draft.write_id)
        return owner is not None and (self.members.is_gone(owner) or entry.draft.write_id in self._lost)

    def _bring(self, name: bytes, row: Row) -> None:
        """Bring a chunk of the object tier to this host, once for all hosts that ask for it meanwhile.

        Raises:
            CapacityError: There is no room for it.
            TierfsError: It cannot be read.
        """
        with self._brought.single_flight(name), self._bringing, buffers().lend(row.raw_length) as out:
            if any(tier.holds(name) for tier in self.room.tiers):
                return
            store = self._state.access.call(lambda publisher: publisher.store())
            fetch(store, row, [(0, out)], store.url)
            self.room.keep_read(name, digest.digests_of(DigestKind(name[0]), out)[0], out)
            self._state.counters["peer_brought_bytes"] += row.raw_length

    def _note_lost(self, write_ids: list[bytes]) -> None:
        self._lost.update(write_ids)
        self._ask_again()

    def _ask_again(self) -> None:
        self._wants_list = True
        self._again.set()

    # -- sending -------------------------------------------------------------------------------------------------------

    def _start_senders(self) -> None:
        """Start a thread for each chosen host, and for each that has to hear that drafts are published."""
        state = self._state
        live, chosen = self.members.live(), self.members.chosen()
        if len(chosen) < self._settings.count:
            text = "%d of %d peers are there: changes stay at a lower level until they reach the object tier"
            self._warn("few", text, len(chosen), self._settings.count)
        else:
            self._warned.discard("few")
        with state.changed:
            for host in [host for host in self._gone if not self.members.knows(host)]:
                del self._gone[host]
                self._unsure.discard(host)
            told = [host for host in live if self._gone.get(host) or host in self._unsure]
            told = [host for host in told if not self.members.rests(host)]
            wanted = {**{host: live[host] for host in told}, **chosen}
        # A thread may end before this one goes on, so it is looked at, and never removes itself.
        self._senders = {host: thread for host, thread in self._senders.items() if thread.is_alive()}
        for host, record in wanted.items():
            if host not in self._senders and not state.stopping:
                thread = start_daemon(self._serve, host, record, name="peer-sender")
                if thread is not None:
                    self._senders[host] = thread

    def _serve(self, host: str, record: PeerRecord) -> None:
        """Send drafts to one host until it fails, or is not needed any more."""
        state = self._state
        context = self._identity.context([record.certificate], server=False)
        client = PeerClient(record, context, self._store, self._pace)
        try:
            with state.changed:
                if host not in self._gone:
                    self._gone[host] = []
                    self._write_gone()  # the next flusher knows then that this host may hold something
            self._tell_rest(client, host)
            compared_s = self._compare(client, host)
            self._clients[host] = client
            self._warned.discard(host)
            self.members.end_rest(host)
            while not state.stopping and (host in self.members.chosen() or self._gone.get(host)):
                self._tell_rest(client, host)
                entry = self._next(host) if host in self.members.chosen() else None
                if entry is not None:
                    self._send(client, host, entry)
                    continue
                with state.changed:
                    if not self._gone.get(host):
                        state.changed.wait(SWEEP_S)
                if state.clock.monotonic() - compared_s > COMPARE_S:
                    compared_s = self._compare(client, host)
        except CapacityError as error:
            state.counters["peer_full"] += 1
            self._give_up(host, "a peer is full, and another one is asked: %s", error)
        except Exception as error:  # noqa: BLE001 - another host is asked, whatever the reason
            state.counters["peer_failures"] += 1
            self._give_up(
                host, f"the peer {record.host} at {record.address} failed, and another one is asked: %s", error
            )
        finally:
            self._clients.pop(host, None)
            client.close()
            self._again.set()

    def _give_up(self, host: str, text: str, error: Exception) -> None:
        state = self._state
        self.members.rest(host)
        if not state.stopping:
            self._warn(host, text, error)
        with state.changed:
            self._unsure.add(host)
            for entry in state.entries:
                entry.holders.discard(host)

    def _compare(self, client: PeerClient, host: str) -> float:
        """Note which drafts a host holds. Let it adopt those that this host does not have any more.

        The other host may have lost its memory meanwhile, so this is done again and again.

        Returns:
            The time, on the monotonic clock.
        """
        state = self._state
        with state.changed:
            sent = [entry for entry in state.entries if host in entry.holders]
        held = client.held()
        with state.changed:
            missing = {entry.draft.write_id for entry in sent} - set(held)
            for entry in sent:
                if entry.draft.write_id in missing:
                    entry.holders.discard(host)
            entries = [entry for entry in map(state.entries.get, held) if entry is not None and not entry.is_foreign]
            for entry in entries:
                state.entries.hold(entry, host, self._settings.count)
            self._unsure.discard(host)
            known = {entry.draft.write_id for entry in entries} | set(self._gone.get(host, ()))
            state.changed.notify_all()
        lost = [write_id for write_id in held if write_id not in known]
        if lost:
            client.adopt(lost)
        return state.clock.monotonic()

    def tell_gone(self, entries: Sequence[FlushItem]) -> None:
        told = set(self._clients)
        for host, client in list(self._clients.items()):
            with client.turn:
                gone = self._held_by(host, entries)
                try:
                    if gone:
                        client.forget(gone)
                except (OSError, TierfsError) as error:
                    told.discard(host)
                    self._clients.pop(host, None)  # until it answers again, later calls do not wait for it
                    _logger.info("the peer %s does not answer: %s", host, error)
        with self._state.changed:
            others = set().union(self._unsure, *(entry.holders for entry in entries)) - told
            for host in others:
                self._gone.setdefault(host, []).extend(self._held_by(host, entries))
            if others:
                self._write_gone()

    def _held_by(self, host: str, entries: Sequence[FlushItem]) -> list[bytes]:
        """Return the write ids of those drafts that a host holds, or may hold."""
        is_unsure = host in self._unsure
        return [entry.draft.write_id for entry in entries if is_unsure or host in entry.holders]

    def _tell_rest(self, client: PeerClient, host: str) -> None:
        """Tell a host what it did not hear before."""
        with self._state.changed:
            gone = list(self._gone.get(host, ()))
        if gone:
            client.forget(gone)
            with self._state.changed:
                self._gone[host] = self._gone[host][len(gone) :]
                self._write_gone()

    def _read_gone(self) -> dict[str, list[bytes]]:
        try:
            found = parse_object(self._gone_file.read_bytes(), str(self._gone_file))
            return {host: [bytes.fromhex(each) for each in write_ids] for host, write_ids in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            _logger.warning("%s cannot be read, so peers may hold what is published: %s", self._gone_file, error)
            return {}

    def _write_gone(self) -> None:
        """Write down what hosts have to hear, for the next flusher. The caller holds the lock."""
        gone = {host: [each.hex() for each in write_ids] for host, write_ids in self._gone.items()}
        temporary = self._gone_file.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(gone), encoding="ascii")
            temporary.replace(self._gone_file)
        except OSError as error:
            self._warn("gone", "what peers have to hear cannot be written down: %s", error)

    def _next(self, host: str) -> FlushItem | None:
        """Return the first draft in closing order that the host does not hold."""
        with self._state.changed:
            for entry in self._state.entries:
                if not entry.is_foreign and not entry.conflict and not entry.published and host not in entry.holders:
                    return entry
        return None

    def _send(self, client: PeerClient, host: str, entry: FlushItem) -> None:
        """Let a host hold a draft, unless the draft is published meanwhile."""
        state, before = self._state, client.sent_bytes
        state.fault("before peer.send")
        try:
            tier = client.send(
                entry.draft, state.sources_of(entry.draft), lambda: state.stopping or not self._is_pending(entry)
            )
        except TierfsError as error:
            if not self._is_pending(entry):
                return  # its slots may have been reused
            if not isinstance(error, CorruptionError):
                raise
            # Drafts that were closed later have to wait, as on the way to the object tier.
            state.counters["peer_unreadable"] += 1
            self._warn("unreadable", "a change cannot be sent to peers, because it cannot be read here: %s", error)
            with state.changed:
                state.changed.wait(SWEEP_S)
            return
        with client.turn:
            if not self._is_pending(entry) or not client.hold(entry.draft, tier):
                return  # if it is still pending, it is sent again
            with state.changed:
                state.counters["peer_sent_bytes"] += client.sent_bytes - before
                state.counters["peer_sent_files"] += 1
                state.entries.hold(entry, host, self._settings.count)
                state.changed.notify_all()
        state.fault("after peer.send")

    def _is_pending(self, entry: FlushItem) -> bool:
        """Return whether a draft still has to be held elsewhere."""
        with self._state.changed:
            return entry.draft.write_id in self._state.entries and not (entry.published or entry.conflict)

    def _warn(self, what: str, text: str, *values: object) -> None:
        """Log a warning, once until the trouble is over."""
        if what not in self._warned:
            self._warned.add(what)
            _logger.warning(text, *values)
