"""Requests and fallbacks of an object tier, gathered from the wrappers around it."""

from __future__ import annotations

from typing import Any

from tierfs.objects import LimitedObjects, MeasuredObjects, ObjectTier, PromisedObjects, RetryingObjects, WrappedObjects

__all__ = ["request_metrics"]


def request_metrics(objects: ObjectTier) -> dict[str, Any]:
    """The counts since the tier was made, as plain values.

    Returns:
        ``object_requests``: by method, of those that were used, ``requests``, ``errors``, ``bytes`` and ``seconds``; see
        `MeasuredObjects`. ``object_fallbacks``: how often the endpoint asked for fewer requests (``throttled``), a
        request was sent again (``retried``), and something else was stored than was sent (``stored_wrong``).
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
