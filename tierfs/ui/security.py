"""`Guard`: who may ask. GET only, known host names, no other origin, a token beyond loopback."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGIN = "/api/login"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach a server that listens at an address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


class Guard:
    """Refuses requests that a browser sends for another page, and those without the token.

    A page of another origin may point a name of its own at this server (DNS rebinding). Its requests have that name in
    ``Host``.

    Args:
        host: The address that the server listens at. Beyond loopback any IP address is a valid ``Host``.
        allowed: Further names of the server.
        token: What a client has to know; ``None`` for nothing.
    """

    def __init__(self, app: ASGIApp, *, host: str, allowed: Sequence[str], token: str | None) -> None:
        self._app = app
        self._remote = not is_loopback(host)
        own = [socket.gethostname(), socket.getfqdn()] if self._remote else []
        self._hosts = {name.lower() for name in ("localhost", host, *own, *allowed)}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan: there are no websockets
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers["Cache-Control"] = "no-cache" if scope["path"].startswith("/static/") else "no-store"
            await send(message)

        asked = HTTPConnection(scope)
        problem = self._problem(asked, scope["method"])
        if problem is not None:
            await PlainTextResponse(f"{problem[1]}\n", problem[0])(scope, receive, send_safely)
        elif scope["path"] == LOGIN:
            answer = PlainTextResponse("ok\n")
            answer.set_cookie(_cookie(asked), self._token or "", httponly=True, samesite="strict")
            await answer(scope, receive, send_safely)
        else:
            await self._app(scope, receive, send_safely)

    def _problem(self, asked: HTTPConnection, method: str) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal."""
        headers, path = asked.headers, asked.scope["path"]
        if method not in {"GET", "HEAD"}:
            return 405, "this server only reads: use GET"
        if not self._is_known(headers.get("host", "")):
            return 421, "this server is not known by that name: give it with `tierfs ui --allow-host`"
        is_page = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        is_own = headers.get("sec-fetch-site", "none") in {"none", "same-origin"} or is_page
        if not is_own or urlsplit(headers.get("origin", f"//{headers['host']}")).netloc != headers["host"]:
            return 403, "another page may not read this one"
        # The page itself holds no data of a store.
        if self._token is None or path == "/" or path.startswith("/static/"):
            return None
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        said = (bearer if kind.lower() == "bearer" else "", asked.cookies.get(_cookie(asked), ""))
        if not any(hmac.compare_digest(each.encode(), self._token.encode()) for each in said):
            return 401, "open the URL that `tierfs ui` printed, or send its token: Authorization: Bearer TOKEN"
        return None

    def _is_known(self, header: str) -> bool:
        try:
            host = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        address = _address(host)
        return host in self._hosts if address is None else self._remote or address.is_loopback


def _cookie(asked: HTTPConnection) -> str:
    """Return the cookie's name. The ports of a host share its cookies, so the port is in the name."""
    return f"tierfs-ui-{(asked.scope.get('server') or ('', 0))[1]}"


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
