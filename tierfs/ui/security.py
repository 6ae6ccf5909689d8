"""`Guard`: who may ask. GET only, known host names, no other origin, a token beyond loopback."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "tierfs-ui"
LOGIN = "/api/login"
OPEN = ("/static/", "/favicon.ico")
"""Paths that need no token, beside the page itself: they hold no data of a store."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach a server that listens at an address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def known_hosts(host: str, more: tuple[str, ...]) -> frozenset[str]:
    """Return the names under which the page may be asked for, beside the addresses of `Guard`.

    A page of another origin may point a name of its own at this server (DNS rebinding). Its requests have that name in
    ``Host``.
    """
    own = {"localhost", host} if is_loopback(host) else {"localhost", host, socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in own.union(more))


class Guard:
    """Refuses requests that a browser sends for another page, and those without the token.

    Args:
        app: The application behind it.
        hosts: See `known_hosts`.
        remote: Whether clients of other machines may ask: then any IP address is a valid ``Host``.
        token: What a client has to know, if anything.
    """

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], remote: bool, token: str | None) -> None:
        self._app = app
        self._hosts = hosts
        self._remote = remote
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if not scope["path"].startswith("/static/"):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        problem = self._problem(scope) if scope["type"] == "http" else (403, "this server has no websockets")
        if problem is not None:
            await PlainTextResponse(f"{problem[1]}\n", problem[0])(scope, receive, send_safely)
        elif scope["path"] == LOGIN:
            answer = PlainTextResponse("ok\n")
            if self._token is not None:
                answer.set_cookie(self._cookie(scope), self._token, httponly=True, samesite="strict")
            await answer(scope, receive, send_safely)
        else:
            await self._app(scope, receive, send_safely)

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal."""
        headers = Headers(scope=scope)
        if scope["method"] not in {"GET", "HEAD"}:
            return 405, "this server only reads: use GET"
        host = _host(headers.get("host", ""))
        if host is None or not self._is_known(host):
            return 421, "this server is not known by that name: give it with `tierfs ui --allow-host`"
        is_page = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"} and not is_page:
            return 403, "another page may not read this one"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers["host"]:
            return 403, "another page may not read this one"
        if self._token is None or scope["path"] == "/" or scope["path"].startswith(OPEN):
            return None
        if not any(hmac.compare_digest(said.encode(), self._token.encode()) for said in self._said(scope, headers)):
            return 401, "open the URL that `tierfs ui` printed, or send its token: Authorization: Bearer TOKEN"
        return None

    def _said(self, scope: Scope, headers: Headers) -> list[str]:
        kind, _, token = headers.get("authorization", "").partition(" ")
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        kept = cookies.get(self._cookie(scope))
        return [*([token] if kind.lower() == "bearer" else []), *([kept.value] if kept is not None else [])]

    def _is_known(self, host: str) -> bool:
        address = _address(host)
        if address is None:
            return host in self._hosts
        return self._remote or address.is_loopback

    @staticmethod
    def _cookie(scope: Scope) -> str:
        """Return the cookie's name. Cookies of one host are shared by its ports, so the port is in the name."""
        return f"{COOKIE}-{(scope.get('server') or ('', 0))[1]}"


def _host(header: str) -> str | None:
    """Return the host in a ``Host`` header, in lower case; ``None`` if the header is invalid."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
