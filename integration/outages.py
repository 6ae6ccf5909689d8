"""Ways in which an object tier is away, as faults of a `TcpFaultProxy` in front of it."""

from tierfs.testing import PlannedTcpFault, TcpFault


def _is_put(method, _):
    return method == "PUT"


def _puts_chunk(method, path):
    return method == "PUT" and "/.tierfs/chunks/" in path


_FAULTS = {
    "hang": PlannedTcpFault(TcpFault.BLACK_HOLE, side="request", at=0),
    "unavailable": PlannedTcpFault(TcpFault.UNAVAILABLE, side="request"),
    "no-puts": PlannedTcpFault(TcpFault.UNAVAILABLE, side="request", aim=_is_put),
    "no-chunks": PlannedTcpFault(TcpFault.UNAVAILABLE, side="request", aim=_puts_chunk),
}


def begin(proxy, outage):
    """Begin an outage: one of the faults above, for each request until ``proxy.recover()``, or ``"refuse"``."""
    proxy.recover()
    if outage == "refuse":
        proxy.refuse = True
    else:
        proxy.fail(_FAULTS[outage])
