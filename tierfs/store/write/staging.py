"""Leave a change to the flusher: it is sealed in the host's ram tier, seen by the host at once, and published later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierfs.errors import ConflictError, NotFoundError, StoreError
from tierfs.format.manifest import Manifest, Record
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import Draft, ObservedBase, SlotRef
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed, observe_published, publish

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers

__all__ = ["check_stands", "follow", "is_staged", "replace", "seal"]


def is_staged(store: Store, path: str, level: Level) -> bool:
    """Whether a write that asks for ``level`` is left to the flusher; else the writer publishes it itself.

    It does so where it is to wait for the object tier anyway, or for one that is the next tier down and this host's own:
    then nothing is won by a detour. But what was closed earlier in the same directory has to be published first, so behind
    that the write queues up.
    """
    if store.tiers is None:
        return False
    if level is not Level.OBJECT and not (level is Level.LOCAL and store.tiers.passes_by):
        return True
    return bool(store.tiers.drafts.pending_below(path.rpartition("/")[0]))


def seal(
    store: Store,
    observed: Observed,
    record: Record,
    *,
    slots: Sequence[SlotRef | None] = (),
    after: bytes | None = None,
) -> None:
    """Seal a change of what was observed: it is pending from now on, and this host sees it.

    Args:
        store: The store, with local tiers.
        observed: The version that the change replaces.
        record: The record to publish.
        slots: Per row of a manifest, which slot holds the chunk for this change; none for rows whose chunks lie elsewhere.
        after: Write id of a draft that has to be published before.

    Raises:
        ConflictError: Another process of this host, or another thread, changed the path since. Nothing is pending.
        CapacityError: The ram tier has no room, and none came in time. Nothing is pending.
        StoreError: A process that was stopped while it sealed a change of the path keeps others from it. Nothing is pending.
    """
    tiers = store.tiers
    assert tiers is not None
    rows = record.rows if isinstance(record, Manifest) else ()
    base = (
        ObservedBase(write_id=observed.draft) if observed.draft is not None else ObservedBase(version=observed.version)
    )
    draft = Draft(observed.path, record, base, tuple(slots) or (None,) * len(rows), after)
    store.hand_over(writes=True)
    tiers.writer.seal_draft(draft, timeout_s=store.timeout_s, check=lambda: _check_unchanged(store, tiers, observed))


def _check_unchanged(store: Store, tiers: Tiers, observed: Observed) -> None:
    """See that the path is as it was, as far as that costs no request to elsewhere: its owner still has the bytes.

    What other hosts changed is found when the change is to be published, and then it is kept as a conflict.
    """
    pending = tiers.drafts.pending(observed.path)
    if pending is not None:
        if pending.draft.write_id != observed.draft:
            raise _changed(store, observed, "on this host")
    elif store.descriptor.endpoint.host_local:
        check_stands(store, observed)


def check_stands(store: Store, observed: Observed) -> None:
    """See that the object tier, if it can be asked now, has what was observed, and nothing newer.

    Raises:
        ConflictError: It has not.
    """
    try:
        is_same = ask_briefly(store, lambda: _stands(store, observed))
    except StoreError:  # it is unreachable: then that comes out later, too
        return
    if not is_same:
        raise _changed(store, observed, "on this host" if store.descriptor.endpoint.host_local else "by another writer")


def _changed(store: Store, observed: Observed, who: str) -> ConflictError:
    return ConflictError(
        f"{store.where(observed.path)} was changed {who} since it was opened: theirs stands, this change was not made; reload "
        "and try again",
        path=observed.path,
    )


def _stands(store: Store, observed: Observed) -> bool:
    """Whether the object tier has what was observed, and nothing newer."""
    if observed.draft is not None:  # it is published by now, as whatever version
        record = observe_published(store, observed.path).record
        return record is None or record.write_id == observed.draft
    try:
        return store.objects.head(observed.key).version == observed.version
    except NotFoundError:
        return observed.version is None


def follow(store: Store, record: Record, path: str, level: Level | None = None) -> None:
    """Tell the flusher of a sealed change, or wait until it has reached ``level``, by default the store's.

    Raises:
        ConflictError: Somebody else changed the path since; theirs stands.
        TimeoutError: The level was not reached in time; the change is pending all the same.
        TierfsError: The reason why it cannot get there; the change is pending all the same.
    """
    assert store.tiers is not None
    wanted = store.ack if level is None else level
    if wanted > Level.STAGED:
        store.tiers.wait(path, wanted, store.timeout_s, write_id=record.write_id)
    else:
        store.tiers.writer.announce(wait=False)


def replace(
    store: Store,
    observed: Observed,
    record: Record,
    *,
    staged: bool = False,
    slots: Sequence[SlotRef | None] = (),
    after: bytes | None = None,
    term: int | None = None,
) -> None:
    """Make a change whose chunks, if it has any, are in place: at once, or behind what it depends on.

    Args:
        store: The store.
        observed: The version that the change replaces.
        record: The new record.
        staged: Whether it depends on something that is pending, other than what it replaces.
        slots: See `seal`.
        after: Write id of a draft that has to be published before.
        term: See `publish`.

    Raises:
        ConflictError, CapacityError, StoreError, ReadOnlyError: As `publish` and `seal` do.
    """
    if observed.draft is None and not staged:
        publish(store, observed, record, term=term)
        return
    seal(store, observed, record, slots=slots, after=after)
    follow(store, record, observed.path)
