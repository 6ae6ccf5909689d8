"""Write a store's status in Prometheus's text format, version 0.0.4.

Names follow Prometheus's rules: the prefix ``tierfs_``, base units (bytes, seconds), and ``_total`` for counters. Every
sample has a ``store`` label. A tier's samples also have a ``tier`` label.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

from tierfs import __version__
from tierfs.errors import InvalidInputError, TierfsError
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


def _metrics(table: Mapping[str, str]) -> tuple[Metric, ...]:
    """Return metrics, given the text of each by its name, and its key where that is another word."""
    return tuple(Metric(names.split()[0], text, names.split()[-1]) for names, text in table.items())


_STORE = _metrics(
    {
        "queue_files": "Files that are not in the object tier yet.",
        "queue_bytes": "Bytes of the files that are not in the object tier yet.",
        "queue_oldest_age_seconds oldest_age_s": "How long ago the first of these files was closed.",
        "upload_bytes_per_second rate_bytes_per_s": "Bytes sent to the object tier, over the last 10 seconds.",
        "unreadable_drafts": "Drafts in the ram tier that cannot be read.",
        "unread_segments": "Segments of the ram tier that cannot be opened, with unknown content.",
        "conflict_files": "Files that another writer changed before they were flushed; kept until discarded.",
        "failing_files": "Files whose last attempt to flush failed; the flusher tries again.",
        "flusher_running flusher.running": "1 if a flusher runs for the store on this host, else 0.",
        "gc_unreadable_records upkeep.gc.unreadable_count": "Unreadable records that kept the last gc from deleting anything.",
        "gc_last_deleted_bytes upkeep.gc.deleted.bytes": "Bytes of chunk objects that the last gc deleted.",
        "gc_last_condemned_bytes upkeep.gc.condemned.bytes": "Bytes that the last gc condemned, because no file needs them.",
        "gc_reached_bytes upkeep.gc.reached.bytes": "Bytes of chunk objects that files needed at the last gc.",
        "gc_last_end_timestamp_seconds upkeep.gc.ended_ns": "When the last gc of the store ended, on any host, even if a record kept it from deleting anything.",
        "gc_last_success_timestamp_seconds upkeep.gc.succeeded_ns": "When the last gc that no record kept from deleting ended; 0 if none has.",
        "gc_last_duration_seconds upkeep.gc.seconds": "How long the last gc took.",
        "missing_chunks": "Chunk objects that files need and that do not exist, by the newest gc or scrub.",
        "vanished_records": "Records that are gone without a tombstone, by the newest gc or scrub.",
        "lost_bytes": "Bytes that repair moved below .tierfs/lost/.",
        "scrub_damaged_chunks upkeep.scrub.known_damaged": "Chunk objects that are known to be damaged.",
        "scrub_last_bytes upkeep.scrub.bytes": "Bytes that the last scrub verified.",
        "scrub_last_end_timestamp_seconds upkeep.scrub.ended_ns": "When the last scrub of the store ended, on any host.",
        "scrub_last_success_timestamp_seconds upkeep.scrub.succeeded_ns": "When the last scrub ended without an error of the object tier; 0 if none has.",
        "scrub_last_duration_seconds upkeep.scrub.seconds": "How long the last scrub took.",
        "scrub_oldest_timestamp_seconds upkeep.scrub.oldest_ns": "When the chunks were verified that were not verified for longest; 0 if some never were.",
    }
)
_BUILD = Metric("build_info", "1; the label says which version of tierfs was queried.")
_RUN = _metrics(
    {
        "checkpoint_newest_step step": "Step of the newest complete checkpoint of a run.",
        "checkpoint_newest_timestamp_seconds published_ns": "When the object tier got this checkpoint's metadata.",
    }
)
_INFO = Metric("tier_info", "1; the label says which level the tier gives.")
_TIER = _metrics(
    {
        "tier_budget_bytes budget_bytes": "Bytes that the tier may hold.",
        "tier_used_bytes used_bytes": "Bytes that the tier holds.",
        "tier_dirty_bytes dirty_bytes": "Bytes that the object tier does not have yet.",
        "tier_clean_bytes clean_bytes": "Bytes that may be dropped, because another tier has them.",
        "tier_host_bytes host_bytes": "Bytes of the tier that all stores of this host use.",
        "tier_store_bytes store_bytes": "Bytes that this store's segments use.",
        "tier_segments segments": "Segments of shared memory.",
        "tier_chunks chunks": "Chunks that the tier holds.",
        "tier_drafts drafts": "Drafts that the tier holds.",
        "tier_conflicts conflicts": "Drafts that the tier keeps because of a conflict.",
        "tier_damaged damaged": "Drafts that lack a chunk.",
        "tier_waits_total waits": "How often writers of the queried process waited for room.",
        "tier_waited_seconds_total waited_s": "How long these writers waited for room.",
        "tier_evicted_bytes_total evicted_bytes": "Bytes of clean copies that were dropped for room.",
        "tier_generations generations": "Snapshots that fit into the GPU memory, summed over this host's processes.",
        "tier_snapshots snapshots": "Snapshots in GPU memory.",
        "tier_newest_age_seconds newest_age_s": "Age of the newest snapshot.",
        "tier_drain_bytes_per_second drain_bytes_per_s": "Bytes per second that go from GPU memory to the ram tier.",
        "tier_drained_bytes_total drained_bytes": "Bytes that went from GPU memory to the ram tier.",
        "tier_skipped_bytes_total skipped_bytes": "Bytes in GPU memory that the ram tier already had.",
        "tier_registered_bytes registered_bytes": "Bytes of shared memory that are registered with a GPU.",
        "tier_unpinned unpinned": "Regions of shared memory that could not be registered with a GPU.",
    }
)
_REQUESTS = _metrics(
    {
        "tier_requests_total requests": "Requests to the tier.",
        "tier_request_errors_total errors": "Requests that failed after all attempts.",
        "tier_request_bytes_total bytes": "Bytes of objects in requests that succeeded.",
        "tier_request_seconds_total seconds": "Time spent waiting for requests, summed over threads.",
    }
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


_Families: TypeAlias = dict[str, tuple[str, str, list[tuple[dict[str, str], float]]]]
"""The kind, the text and the samples of each metric, by its name."""


def serve_metrics(port: int, report: Callable[[], Mapping[str, Any]]) -> None:
    """Answer ``GET /metrics`` on this host's own address with a store's metrics, on daemon threads.

    ``report`` returns the store's status. It is called on a thread of its own for each request. Raises
    `InvalidInputError` if the port cannot be used.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415 - only where it is asked for

    class MetricsHandler(BaseHTTPRequestHandler):
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

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), MetricsHandler)
    except (OSError, OverflowError) as error:
        raise InvalidInputError(f"the metrics cannot be served at port {port} ({error}): give another one") from error
    start_daemon(server.serve_forever, name="metrics")


def exposition(*reports: Mapping[str, Any]) -> str:
    """Write results of `tierfs.store.status` in Prometheus's text format, which has the head of each metric once.

    Missing values and values of an unexpected type are skipped.
    """
    families: _Families = {}
    for report in reports:
        _add(families, report)
    return "".join(_lines(name, *family) for name, family in families.items())


def _add(families: _Families, report: Mapping[str, Any]) -> None:
    store = {"store": str(report["store"])}
    # A flusher reports the number of conflicts and failing files, because it lists only some of them.
    counted = {"conflict_files": "conflicts", "failing_files": "errors"}
    report = {**{key: len(report.get(listed, ())) for key, listed in counted.items()}, **report}

    def add(metric: Metric, value: object, **labels: str) -> None:
        if isinstance(value, (int, float)):
            if metric.key.endswith("_ns"):
                value = value / 1e9
            kind = "counter" if metric.name.endswith("_total") else "gauge"
            family = families.setdefault(f"tierfs_{metric.name}", (kind, metric.text, []))
            family[2].append(({**store, **labels}, float(value) if isinstance(value, float) else int(value)))

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


def _at(values: Any, key: str) -> object:
    """Return the value at a dotted key, or None."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _base(key: str) -> str:
    """Convert a key to the middle part of a metric's name, in base units."""
    return _SECONDS.sub("_seconds", _NO_NAME.sub("_", key))


def _lines(name: str, kind: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    # File names may be invalid Unicode, which cannot be encoded.
    value = value.encode(errors="backslashreplace").decode()
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
