"""Write a store's status in Prometheus's text format, version 0.0.4.

Names follow Prometheus's rules: the prefix ``tierfs_``, base units (bytes, seconds), and ``_total`` for counters. Every
sample has a ``store`` label. A tier's samples also have a ``tier`` label.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from tierfs import __version__
from tierfs.errors import TierfsError
from tierfs.threads import start_daemon

LOOPBACK = "127.0.0.1"
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
_SECONDS = re.compile(r"_s$")


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: Without ``tierfs_``. A counter's name ends in ``_total``.
        text: One sentence that says what the metric counts.
        key: Dotted path of the value in the status, in a tier's part of it, or in the counts of one method.
    """

    name: str
    text: str
    key: str = ""


_STORE = (
    Metric("queue_files", "Files that are not in the object tier yet.", "queue_files"),
    Metric("queue_bytes", "Bytes of the files that are not in the object tier yet.", "queue_bytes"),
    Metric("queue_oldest_age_seconds", "How long ago the first of these files was closed.", "oldest_age_s"),
    Metric("upload_bytes_per_second", "Bytes sent to the object tier, over the last 10 seconds.", "rate_bytes_per_s"),
    Metric("unreadable_drafts", "Drafts in the ram tier that cannot be read.", "unreadable_drafts"),
    Metric(
        "unread_segments", "Segments of the ram tier that cannot be opened, with unknown content.", "unread_segments"
    ),
    Metric(
        "conflict_files",
        "Files that another writer changed before they were flushed; kept until discarded.",
        "conflict_files",
    ),
    Metric("failing_files", "Files whose last attempt to flush failed; the flusher tries again.", "failing_files"),
    Metric("flusher_running", "1 if a flusher runs for the store on this host, else 0.", "flusher.running"),
    Metric(
        "gc_unreadable_records",
        "Unreadable records that kept the last gc from deleting anything.",
        "upkeep.gc.unreadable_count",
    ),
    Metric("gc_last_deleted_bytes", "Bytes of chunk objects that the last gc deleted.", "upkeep.gc.deleted.bytes"),
    Metric(
        "gc_last_condemned_bytes",
        "Bytes that the last gc condemned, because no file needs them.",
        "upkeep.gc.condemned.bytes",
    ),
    Metric("gc_reached_bytes", "Bytes of chunk objects that files needed at the last gc.", "upkeep.gc.reached.bytes"),
    Metric(
        "gc_last_end_timestamp_seconds",
        "When the last gc of the store ended, on any host, even if a record kept it from deleting anything.",
        "upkeep.gc.ended_ns",
    ),
    Metric(
        "gc_last_success_timestamp_seconds",
        "When the last gc that no record kept from deleting ended; 0 if none has.",
        "upkeep.gc.succeeded_ns",
    ),
    Metric("gc_last_duration_seconds", "How long the last gc took.", "upkeep.gc.seconds"),
    Metric(
        "missing_chunks",
        "Chunk objects that files need and that do not exist, by the newest gc or scrub.",
        "missing_chunks",
    ),
    Metric(
        "vanished_records",
        "Records that are gone without a tombstone, by the newest gc or scrub.",
        "vanished_records",
    ),
    Metric("lost_bytes", "Bytes that repair moved below .tierfs/lost/.", "lost_bytes"),
    Metric("scrub_damaged_chunks", "Chunk objects that are known to be damaged.", "upkeep.scrub.known_damaged"),
    Metric("scrub_last_bytes", "Bytes that the last scrub verified.", "upkeep.scrub.bytes"),
    Metric(
        "scrub_last_end_timestamp_seconds",
        "When the last scrub of the store ended, on any host.",
        "upkeep.scrub.ended_ns",
    ),
    Metric(
        "scrub_last_success_timestamp_seconds",
        "When the last scrub ended without an error of the object tier; 0 if none has.",
        "upkeep.scrub.succeeded_ns",
    ),
    Metric("scrub_last_duration_seconds", "How long the last scrub took.", "upkeep.scrub.seconds"),
    Metric(
        "scrub_oldest_timestamp_seconds",
        "When the chunks were verified that were not verified for longest; 0 if some never were.",
        "upkeep.scrub.oldest_ns",
    ),
)
_BUILD = Metric("build_info", "1; the label says which version of tierfs was queried.")
_RUN = (
    Metric("checkpoint_newest_step", "Step of the newest complete checkpoint of a run.", "step"),
    Metric(
        "checkpoint_newest_timestamp_seconds", "When the object tier got this checkpoint's metadata.", "published_ns"
    ),
)
_INFO = Metric("tier_info", "1; the label says which level the tier gives.")
_TIER = (
    Metric("tier_budget_bytes", "Bytes that the tier may hold.", "budget_bytes"),
    Metric("tier_used_bytes", "Bytes that the tier holds.", "used_bytes"),
    Metric("tier_dirty_bytes", "Bytes that the object tier does not have yet.", "dirty_bytes"),
    Metric("tier_clean_bytes", "Bytes that may be dropped, because another tier has them.", "clean_bytes"),
    Metric("tier_host_bytes", "Bytes of the tier that all stores of this host use.", "host_bytes"),
    Metric("tier_store_bytes", "Bytes that this store's segments use.", "store_bytes"),
    Metric("tier_segments", "Segments of shared memory.", "segments"),
    Metric("tier_chunks", "Chunks that the tier holds.", "chunks"),
    Metric("tier_drafts", "Drafts that the tier holds.", "drafts"),
    Metric("tier_conflicts", "Drafts that the tier keeps because of a conflict.", "conflicts"),
    Metric("tier_damaged", "Drafts that lack a chunk.", "damaged"),
    Metric("tier_waits_total", "How often writers of the queried process waited for room.", "waits"),
    Metric("tier_waited_seconds_total", "How long these writers waited for room.", "waited_s"),
    Metric("tier_evicted_bytes_total", "Bytes of clean copies that were dropped for room.", "evicted_bytes"),
    Metric(
        "tier_generations", "Snapshots that fit into the GPU memory, summed over this host's processes.", "generations"
    ),
    Metric("tier_snapshots", "Snapshots in GPU memory.", "snapshots"),
    Metric("tier_newest_age_seconds", "Age of the newest snapshot.", "newest_age_s"),
    Metric(
        "tier_drain_bytes_per_second", "Bytes per second that go from GPU memory to the ram tier.", "drain_bytes_per_s"
    ),
    Metric("tier_drained_bytes_total", "Bytes that went from GPU memory to the ram tier.", "drained_bytes"),
    Metric("tier_skipped_bytes_total", "Bytes in GPU memory that the ram tier already had.", "skipped_bytes"),
    Metric("tier_registered_bytes", "Bytes of shared memory that are registered with a GPU.", "registered_bytes"),
    Metric("tier_unpinned", "Regions of shared memory that could not be registered with a GPU.", "unpinned"),
)
_REQUESTS = (
    Metric("tier_requests_total", "Requests to the tier.", "requests"),
    Metric("tier_request_errors_total", "Requests that failed after all attempts.", "errors"),
    Metric("tier_request_bytes_total", "Bytes of objects in requests that succeeded.", "bytes"),
    Metric("tier_request_seconds_total", "Time spent waiting for requests, summed over threads.", "seconds"),
)
_FALLBACKS = Metric("tier_fallbacks_total", "How often the tier used a fallback.")
METRICS: tuple[tuple[tuple[str, ...], tuple[Metric, ...]], ...] = (
    ((), _STORE),
    (("version",), (_BUILD,)),
    (("run",), _RUN),
    (("tier", "gives"), (_INFO,)),
    (("tier",), _TIER),
    (("tier", "by", "method"), _REQUESTS),
    (("tier", "fallback"), (_FALLBACKS,)),
)
"""All metrics but the status's counters. Each group names its labels beside ``store``."""


@dataclass(slots=True)
class _Family:
    kind: str
    text: str
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)


def serve_metrics(port: int, report: Callable[[], Mapping[str, Any]]) -> None:
    """Answer ``GET /metrics`` on this host's own address with a store's metrics, on daemon threads.

    Args:
        port: The TCP port.
        report: Returns the store's status. Called on a thread of its own for each request.

    Raises:
        OSError: The port cannot be used.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415 - only where it is asked for

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(HTTPStatus.NOT_FOUND, "see /metrics")
                return
            try:
                body = exposition(report()).encode()
            except TierfsError as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log no requests."""

    server = ThreadingHTTPServer((LOOPBACK, port), Answer)
    start_daemon(server.serve_forever, name="metrics")


def exposition(report: Mapping[str, Any]) -> str:
    """Write a store's status in Prometheus's text format.

    Args:
        report: From `tierfs.store.status`. Missing values and values of an unexpected type are skipped.
    """
    families: dict[str, _Family] = {}
    store = {"store": str(report["store"])}
    # A flusher reports the number of conflicts and failing files, because it lists only some of them.
    counted = {"conflict_files": "conflicts", "failing_files": "errors"}
    report = {**{key: len(report.get(listed, ())) for key, listed in counted.items()}, **report}

    def add(metric: Metric, value: object, **labels: str) -> None:
        if isinstance(value, (int, float)):
            if metric.key.endswith("_ns"):
                value = value / 1e9
            kind = "counter" if metric.name.endswith("_total") else "gauge"
            family = families.setdefault(f"tierfs_{metric.name}", _Family(kind, metric.text))
            family.samples.append(({**store, **labels}, float(value) if isinstance(value, float) else int(value)))

    for metric in _STORE:
        add(metric, _at(report, metric.key))
    add(_BUILD, 1, version=__version__)
    for run, newest in report.get("checkpoints", {}).items():
        for metric in _RUN:
            add(metric, _at(newest, metric.key), run=run or "/")
    for tier, values in report.get("tiers", {}).items():
        add(_INFO, 1, tier=tier, gives=str(values.get("gives", "")))
        for metric in _TIER:
            add(metric, _at(values, metric.key), tier=tier)
        for what, count in values.get("fallbacks", {}).items():
            add(_FALLBACKS, count, tier=tier, fallback=what)
        for asked, counts in values.get("requests", {}).items():
            who, _, method = asked.partition("_")
            for metric in _REQUESTS:
                add(metric, _at(counts, metric.key), tier=tier, by=who, method=method)
    for key, count in report.get("counters", {}).items():
        who, _, what = key.partition("_")
        by = "the flusher" if who == "flusher" else f"the queried {who}"
        add(Metric(f"{_base(key)}_total", f"Counted by {by} since it started: {what.replace('_', ' ')}."), count)
    return "".join(_lines(name, family) for name, family in families.items())


def _at(values: Any, key: str) -> object:
    """Return the value at a dotted key, or None."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _base(key: str) -> str:
    """Convert a key to the middle part of a metric's name, in base units."""
    return _SECONDS.sub("_seconds", _NO_NAME.sub("_", key))


def _lines(name: str, family: _Family) -> str:
    text = family.text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {family.kind}"]
    for labels, value in family.samples:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    # File names may be invalid Unicode, which cannot be encoded.
    value = value.encode(errors="backslashreplace").decode()
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
