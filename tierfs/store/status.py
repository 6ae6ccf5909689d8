"""The status of a store on this host, for people: tiers, queue, conflicts, errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tierfs import kernels
from tierfs.clock import boot_id
from tierfs.errors import StoreError, TierfsError
from tierfs.host.host import SMALL_SHM
from tierfs.host.nvme.stored import ARENA_FILE
from tierfs.host.pending.levels import Level
from tierfs.host.segment_folder import unused_folders
from tierfs.objects import PromisedObjects
from tierfs.store.device_notes import read_notes
from tierfs.store.local_changes import tiers_below
from tierfs.store.request_metrics import request_metrics
from tierfs.store.store import Store
from tierfs.urls_as_paths import misplaced

if TYPE_CHECKING:
    from tierfs.host.pending.record import Draft
    from tierfs.host.slab.ram import RamTier

ASK_TIMEOUT_S = 5.0
NO_NVME = "the flusher runs without it: %s"
LOG_SAYS = "flusher.log in the store's state directory says why"


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
    report["unused_folders"] = [folder._asdict() for folder in unused_folders(tiers.ram.host.segments)]
    if tiers.has_nvme:
        report["tiers"]["nvme"] = {**asdict(tiers.nvme.usage()), "gives": tiers.drafts.stored_level.label}
    for tier, problem in tiers.problems.items():
        report["tiers"].setdefault(tier, {"gives": ""})["problem"] = problem
    if "nvme" in tiers.problems and not (tiers.nvme.directory / ARENA_FILE).exists():
        report["tiers"]["nvme"]["gives"] = ""
    device = read_notes(store)
    if device is not None:
        report["tiers"]["device"] = device
    pending = tiers.drafts.pending_below("")
    report["queue_files"] = len(pending)
    report["queue_bytes"] = sum(item.draft.length for item in pending.values())
    report["oldest_age_s"] = _oldest_age_s([item.draft for item in pending.values()], store.clock.monotonic())
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
    disk_segments = usage.pop("disk_segments")
    report = {**usage, "gives": Level.STAGED.label, "fallbacks": {"disk_segments": disk_segments}}
    if disk_segments or ram.host.segments == ram.host.fallback:
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
