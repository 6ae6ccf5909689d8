"""The status of a store for people: on this host its tiers, queue, conflicts and errors; its condition on any host.

No other process can inspect a process's GPU memory. So each process with a device tier replaces a note, a small file in
the store's directory, after every save. A note counts while the process that wrote it is alive.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tierfs import kernels
from tierfs.checked_json import parse_object
from tierfs.clock import boot_id
from tierfs.errors import NotFoundError, StoreError, TierfsError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT
from tierfs.format.manifest import TOMBSTONE_BYTES
from tierfs.format.upkeep import SCRUB_BYTES_MAX, ScrubRecord
from tierfs.host.host import SMALL_SHM
from tierfs.host.pending.levels import Level
from tierfs.host.segment_folder import unused_folders
from tierfs.objects import LimitedObjects, MeasuredObjects, ObjectTier, PromisedObjects, RetryingObjects, WrappedObjects
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import Prefix, objects_below
from tierfs.store.local_changes import tiers_below
from tierfs.store.maintenance.gc_turn import read_collector
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store
from tierfs.store.tree.walk import directory_name
from tierfs.urls_as_paths import misplaced

if TYPE_CHECKING:
    from tierfs.host.pending.record import Draft
    from tierfs.host.slab.ram import RamTier


ASK_TIMEOUT_S = 5.0
NO_NVME = "the flusher runs without it: %s"
LOG_SAYS = "flusher.log in the store's state directory says why"
_NOTE_PREFIX, _NOTE_SUFFIX = "device-", ".json"
_NOTES_SUMMED = (
    "budget_bytes",
    "used_bytes",
    "generations",
    "snapshots",
    "drained_bytes",
    "skipped_bytes",
    "drain_bytes_per_s",
    "registered_bytes",
    "unpinned",
)
PREFIX_COUNT = 256
DIRECTORIES_MAX = 32
NEWEST_TRIED = 4
_NUMBER = re.compile(r"[0-9]+")
_logger = logging.getLogger("tierfs.store")


def status(store: Store) -> dict[str, Any]:
    """Describe a store's tiers on this host, as plain values: the output of ``tierfs status --json``.

    No flusher is needed. If none runs, pending changes are counted in the tiers themselves.
    """
    report: dict[str, Any] = {
        "store": store.url,
        "uuid": store.descriptor.uuid,
        "ack": store.ack.label,
        "tiers": {"object": _object_tier(store)},
        "flusher": {"running": False},
        "queue_files": 0,
        "queue_bytes": 0,
        "oldest_age_s": 0.0,
        "conflicts": [],
        "errors": [],
        "counters": {},
        "misplaced": misplaced(),
        "unused_folders": [],
        "kernels": kernels.status(),
        "records": {"process": store.records.status()},
    }
    if store.host_records is not None:
        report["records"]["host"] = store.host_records.status()
    try:
        tiers = tiers_below(store, "")
    except TierfsError as error:
        tiers = None
        report["errors"] = [{"path": error.path or "", "message": str(error), "attempts": 0}]
    if tiers is None:
        if store.unused:
            report["tiers"] |= {tier: {"gives": "", "problem": store.unused} for tier in ("ram", "nvme")}
        return report
    report["tiers"]["ram"] = _ram_tier(tiers.ram)
    report["unused_folders"] = [
        {"folder": folder, "bytes": size, "state_directory": state}
        for folder, size, state in unused_folders(tiers.ram.host.segments)
        if not state.startswith(f"{tiers.ram.host.directory}/")  # memory of a log of steps
    ]
    if tiers.has_nvme:
        report["tiers"]["nvme"] = {**asdict(tiers.nvme.usage()), "gives": tiers.drafts.stored_level.label}
    for tier, problem in tiers.problems.items():
        report["tiers"].setdefault(tier, {"gives": ""})["problem"] = problem
    device = read_notes(store)
    if device is not None:
        report["tiers"]["device"] = device
    drafts = [item.draft for item in tiers.drafts.pending_below("").values()]
    report["queue_files"], report["queue_bytes"] = len(drafts), sum(draft.length for draft in drafts)
    report["oldest_age_s"] = _oldest_age_s(drafts, store.clock.monotonic())
    report["counters"] = _counted_by("process", dict(sorted(tiers.counters.items())))
    if tiers.flusher.is_running():
        try:
            answer = tiers.flusher.request("status", {}, timeout_s=ASK_TIMEOUT_S)
        except (StoreError, TimeoutError) as error:
            report["flusher"] = {"running": True, "silent": str(error)}
        else:
            report["flusher"] = {"running": True, "pid": answer.pop("pid")}
            has_nvme, fallbacks = answer.pop("has_nvme"), answer.pop("nvme_fallbacks")
            why, evicted_bytes = answer.pop("nvme_problem", ""), answer.pop("nvme_evicted_bytes", 0)
            if tiers.has_nvme:
                report["tiers"]["nvme"]["evicted_bytes"] = evicted_bytes
                report["tiers"]["nvme"]["fallbacks"] |= fallbacks
                if not has_nvme:
                    said = tiers.problems.get("nvme") or NO_NVME % (why or LOG_SAYS)
                    report["tiers"]["nvme"] |= {"gives": "", "problem": said}
            for kind in ("requests", "fallbacks"):
                report["tiers"]["object"][kind] |= _counted_by("flusher", answer.pop(f"object_{kind}", {}))
            report["counters"] |= _counted_by("flusher", answer.pop("counters"))
            report |= answer
    else:
        report["conflicts"] = [{"path": path, "message": text} for path, text in tiers.drafts.conflicts()]
    return report


def _oldest_age_s(drafts: Iterable[Draft], now_s: float) -> float:
    """Return the seconds since the oldest draft was closed.

    The clock starts at boot. A draft from an earlier boot counts as closed at this boot.
    """
    boot = boot_id()
    ages_s = (now_s - draft.stamp_ns / 1e9 if draft.boot == boot else now_s for draft in drafts)
    return round(max(ages_s, default=0.0), 3)


def _ram_tier(ram: RamTier) -> dict[str, Any]:
    usage = asdict(ram.usage())
    fallbacks = {name: usage.pop(name) for name in ("disk_segments", "overflow_segments")}
    report = {**usage, "gives": Level.STAGED.label, "fallbacks": fallbacks}
    if fallbacks["disk_segments"] or ram.host.segments == ram.host.fallback:
        report["problem"] = SMALL_SHM
    return report


def _object_tier(store: Store) -> dict[str, Any]:
    """Describe the object tier, with the requests of this process."""
    local = store.descriptor.endpoint.host_local
    counted = request_metrics(store.objects)
    return {
        "url": store.url,
        "gives": Level.OBJECT.label,
        "host_local": local,
        "survives": "loss of this process, not of this host" if local else "loss of this host",
        "reads_back": isinstance(store.objects, PromisedObjects) and store.objects.reads_back,
        "requests": _counted_by("process", counted["object_requests"]),
        "fallbacks": _counted_by("process", counted["object_fallbacks"]),
    }


def _counted_by(who: str, counts: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{who}_{name}": count for name, count in counts.items()}


def request_metrics(objects: ObjectTier) -> dict[str, Any]:
    """Return the counts since the tier was created, as plain values.

    Returns:
        ``object_requests``: for each method that was called, ``requests``, ``errors``, ``bytes`` and
        ``seconds``; see `MeasuredObjects`. ``object_fallbacks``: how often the endpoint asked for fewer
        requests (``throttled``), a request was sent again (``retried``), and the stored bytes differed from
        those sent (``stored_wrong``).
    """
    requests: dict[str, dict[str, int | float]] = {}
    fallbacks: dict[str, int] = {}
    layer = objects
    while isinstance(layer, WrappedObjects):
        match layer:
            case MeasuredObjects():
                requests = {method: counts for method, counts in layer.snapshot().items() if counts["requests"]}
            case RetryingObjects():
                fallbacks["retried"] = layer.retries
            case LimitedObjects():
                fallbacks["throttled"] = layer.throttled
            case PromisedObjects():
                fallbacks["stored_wrong"] = layer.stored_wrong
        layer = layer.inner
    return {"object_requests": requests, "object_fallbacks": fallbacks}


def leave_note(store: Store, report: Mapping[str, Any]) -> None:
    """Replace this process's note by JSON values: the device tier as `TierWriter.status` shows it.

    The store must have local tiers.
    """
    assert store.tiers is not None
    host = store.tiers.ram.host
    try:
        path = host.store_directory(store.descriptor.uuid) / f"{_NOTE_PREFIX}{host.owner()}{_NOTE_SUFFIX}"
        new = path.with_suffix(f".{threading.get_ident()}.new")  # two saves may end at the same time
        new.write_text(json.dumps({**report, "written_ns": time.time_ns()}))
        os.replace(new, path)
    except (OSError, TierfsError) as error:
        store.tiers.counters.fall_back(
            "no_device_note", "`tierfs status` does not show the device tier: %s", str(error)
        )


def read_notes(store: Store) -> dict[str, Any] | None:
    """Return the sums over the notes of live processes, or None without any. Delete the notes of dead processes."""
    assert store.tiers is not None
    host = store.tiers.ram.host
    found: list[dict[str, Any]] = []
    for path in host.store_directory(store.descriptor.uuid).glob(f"{_NOTE_PREFIX}*{_NOTE_SUFFIX}"):
        try:
            if host.is_alive(path.stem.removeprefix(_NOTE_PREFIX)):
                found.append(parse_object(path.read_bytes(), str(path)))
            else:
                path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:  # noqa: PERF203 - one note that cannot be read must not hide the others
            _logger.debug("%s is skipped: %s", path, error)
    if not found:
        return None
    total: dict[str, Any] = {name: sum(int(note.get(name) or 0) for note in found) for name in _NOTES_SUMMED}
    ages = [
        round(float(note["newest_age_s"]) + max(0.0, (time.time_ns() - int(note["written_ns"])) / 1e9), 3)
        for note in found
        if note.get("newest_age_s") is not None
    ]
    devices = sorted({str(note["device"]) for note in found if "device" in note})
    return {
        "gives": "none",
        "processes": len(found),
        "device": ", ".join(devices),
        **total,
        "newest_age_s": min(ages) if ages else None,
    }


def condition(store: Store) -> dict[str, Any]:
    """Return the store's condition as plain values, for its status.

    A part is missing if it cannot be read, or if its task never ran. If the store has local tiers, the object tier has
    to answer within a moment.

    Returns:
        ``upkeep``: the results of ``gc`` and ``scrub`` as their records have them. ``missing_chunks`` and
        ``vanished_records``: by the newer of the two. ``lost_bytes``: bytes that `repair` moved aside.
        ``checkpoints``: see `newest_checkpoints`.
    """
    bare = store.without_local_tiers()

    def scrubbed() -> dict[str, Any]:
        where = bare.where(keys.SCRUB)
        record, _, _ = read_decoded(bare.objects, keys.SCRUB, SCRUB_BYTES_MAX, ScrubRecord.decode, where)
        times_ns = [state.verified_ns for state in record.prefixes.values()]
        oldest_ns = min(times_ns) if len(times_ns) == PREFIX_COUNT else 0
        return {**record.last, "known_damaged": len(record.damaged), "oldest_ns": oldest_ns} if record.last else {}

    looks: dict[str, Callable[[], Any]] = {
        "gc": lambda: dict(read_collector(bare)[0].last),
        "scrub": scrubbed,
        "lost_bytes": lambda: sum(item.size for item in objects_below(bare.objects, keys.LOST)),
        "checkpoints": lambda: newest_checkpoints(bare),
    }

    def ask(look: Callable[[], Any]) -> Any:
        try:
            return ask_briefly(store, look) if store.tiers is not None else look()
        except TierfsError:
            return {}

    found = {name: value for name, look in looks.items() if (value := ask(look)) != {}}
    upkeep = {name: found.pop(name) for name in ("gc", "scrub") if name in found}
    if upkeep:
        found["upkeep"] = upkeep
    gc, scrub = upkeep.get("gc", {}), upkeep.get("scrub", {})
    for name, key, gc_time in (
        ("missing_chunks", "missing", "succeeded_ns"),
        ("vanished_records", "vanished", "ended_ns"),
    ):
        known = [(gc.get(gc_time, 0), gc.get(key)), (scrub.get("looked_ns", 0), scrub.get(key))]
        newest = max(((time, count) for time, count in known if count is not None), default=None)
        if newest is not None:
            found[name] = newest[1]
    return found


def newest_checkpoints(store: Store) -> dict[str, dict[str, int]]:
    """Return the newest complete checkpoint of each run: its step, and when the object tier got its metadata.

    A run is a directory whose subdirectories have numbers in their names, such as ``step_100``. This lists at most
    `DIRECTORIES_MAX` directories from the root on, and looks at the `NEWEST_TRIED` highest steps of each.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    found: dict[str, dict[str, int]] = {}
    left = [""]
    for _ in range(DIRECTORIES_MAX):
        if not left:
            break
        directory = left.pop(0)
        listed = store.objects.list(keys.directory_prefix(directory), delimiter=True)
        names = [name for item in listed if isinstance(item, Prefix) and (name := directory_name(item.key))]
        steps = sorted(((int(numbers[-1]), name) for name in names if (numbers := _NUMBER.findall(name))), reverse=True)
        for step, name in steps[:NEWEST_TRIED]:
            try:
                info = store.objects.head(keys.record_key(keys.inside(directory, f"{name}/{ROOT}")))
            except NotFoundError:
                continue
            if info.size != TOMBSTONE_BYTES:
                found[directory] = {"step": step, "published_ns": info.modified_ns}
                break
        else:
            left += [keys.inside(directory, name) for name in names]
    return found
