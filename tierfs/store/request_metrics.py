"""Counts of an object tier's requests and fallbacks, collected from the wrappers around it."""

from __future__ import annotations

from typing import Any

from tierfs.objects import LimitedObjects, MeasuredObjects, ObjectTier, PromisedObjects, RetryingObjects, WrappedObjects


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
