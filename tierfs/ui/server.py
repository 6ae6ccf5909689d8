"""The page's HTTP server: routes, events, and the process that serves them."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tierfs import __version__
from tierfs.checkpoint.retention import Rule, parse_rule
from tierfs.cli.commands._status_prometheus import exposition
from tierfs.cli.commands.prune import decision_document
from tierfs.cli.files.places import StorePlace
from tierfs.cli.terminal.failures import describe
from tierfs.errors import InvalidInputError, NotFoundError, ReadOnlyError, TierfsError
from tierfs.format import keys
from tierfs.store import stat
from tierfs.ui import content
from tierfs.ui.jobs import Jobs, status_of
from tierfs.ui.plain import plain_page
from tierfs.ui.security import Guard, is_loopback, known_hosts
from tierfs.ui.view import StoreView

STATIC = Path(__file__).parent / "static"
TICK_S = 0.5
BEAT_TICKS = 2
"""The server says every second that it lives."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ID = secrets.token_hex(8)
"""The id of this process: the page loads everything again when it changes."""


class Page:
    """The routes of the server.

    Args:
        views: The URLs that are shown.
        allow_download: Whether files may be downloaded.
    """

    def __init__(self, views: Sequence[StoreView], *, allow_download: bool) -> None:
        self._views = views
        self._allow_download = allow_download
        self._jobs = Jobs()
        self.is_closing = False

    def __repr__(self) -> str:
        return f"Page({list(self._views)})"

    def routes(self) -> list[Route | Mount]:
        def documents(answer: Callable[[Request], tuple[int, Any]]) -> Callable[[Request], Response]:
            def respond(request: Request) -> Response:
                try:
                    code, document = answer(request)
                except (TierfsError, OSError) as error:
                    failure = describe(error)
                    document = {"error": {"kind": failure.kind, "message": failure.message, "path": failure.path}}
                    code = status_of(document["error"])
                return Response(json.dumps(document, separators=(",", ":")), code, media_type="application/json")

            return respond

        api = {
            "stores": lambda _request: (200, self._about()),
            "status": lambda request: (200, self._view(request).report()),
            "checkpoints": self._checkpoints,
            "prune": self._prune,
            "checkpoint": self._checkpoint,
            "diff": self._diff,
            "times": self._times,
            "files": lambda request: (200, content.files(self._place(request, "path"))),
            "preview": lambda request: (200, content.preview(self._place(request, "path"))),
        }
        return [
            Route("/", lambda _request: FileResponse(STATIC / "index.html")),
            Route("/plain", self._plain),
            *(Route(f"/api/{name}.json", documents(answer)) for name, answer in api.items()),
            Route("/api/events", self._events),
            Route("/metrics", self._metrics),
            Route("/download", self._download),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

    def _view(self, request: Request) -> StoreView:
        text = request.query_params.get("store", "0")
        if not text.isdecimal() or int(text) >= len(self._views):
            raise NotFoundError(f"there is no store {text!r} on this page: /api/stores.json lists them")
        view = self._views[int(text)]
        view.watch()
        return view

    def _place(self, request: Request, name: str) -> StorePlace:
        """Return the place at a path of the store that a parameter of the request names, below the URL of the view."""
        top = self._view(request).open()
        path = request.query_params.get(name, top.path)
        if not keys.is_at_or_below(path, top.path):
            raise NotFoundError(f"{path!r} is not at or below {top.url}", path=path)
        return top.child(top.relative(path))

    def _about(self) -> dict[str, Any]:
        stores = [{**view.status(), "history": view.history()} for view in self._views]
        about = {"version": __version__, "server": _ID, "allow_download": self._allow_download}
        return {**about, "stores": stores}

    def _checkpoints(self, request: Request) -> tuple[int, Any]:
        since = request.query_params.get("since", "")
        view = self._view(request)
        return 200, {"url": view.open().url, **view.checkpoints(int(since) if since.isdecimal() else None)}

    def _prune(self, request: Request) -> tuple[int, Any]:
        view = self._view(request)
        rules: list[Rule] = [parse_rule(text) for text in request.query_params.getlist("keep")] or [*view.list.rules]
        if not rules:
            raise InvalidInputError("name at least one rule, like keep=latest:3")
        place = view.open()
        found = [decision_document(each) for each in view.list.decisions(place, rules)]
        return 200, {"url": place.url, "dry_run": True, "checkpoints": found}

    def _key(self, request: Request, *places: StorePlace) -> tuple[object, ...]:
        """Return a key of the present content of checkpoints."""
        rows = [self._view(request).list.row(place.path) for place in places]
        return tuple(
            (place.url, None if row is None else tuple(sorted(row[1].roots.items())))
            for place, row in zip(places, rows, strict=True)
        )

    def _checkpoint(self, request: Request) -> tuple[int, Any]:
        place, codecs = self._place(request, "path"), request.query_params.get("codecs") == "1"
        key = ("show", codecs, *self._key(request, place))
        return self._jobs.answer(key, lambda job: content.show(place, job, codecs=codecs))

    def _diff(self, request: Request) -> tuple[int, Any]:
        a, b = self._place(request, "a"), self._place(request, "b")
        return self._jobs.answer(("diff", *self._key(request, a, b)), lambda job: content.diff(a, b, job))

    def _times(self, request: Request) -> tuple[int, Any]:
        view, top = self._view(request), self._place(request, "path")
        rows = [row for row in view.list.changes(0)["checkpoints"] if keys.is_at_or_below(row["path"], top.path)]
        places = [top.child(top.relative(row["path"])) for row in rows if row["state"] == "complete"]
        places = places[: content.TIMED_MAX]
        return self._jobs.answer(("times", *self._key(request, *places)), lambda job: content.times(places, job))

    def _metrics(self, _request: Request) -> Response:
        try:
            text = merged(exposition(view.report()) for view in self._views)
        except (TierfsError, OSError) as error:
            return PlainTextResponse(f"{describe(error).message}\n", 503)
        return Response(text, media_type=METRICS_TYPE)

    def _plain(self, _request: Request) -> Response:
        return HTMLResponse(plain_page([(view.status(), view.checkpoints(0)) for view in self._views]))

    def _download(self, request: Request) -> Response:
        try:
            if not self._allow_download:
                raise ReadOnlyError("downloads are off: start `tierfs ui` with --allow-download")
            place = self._place(request, "path")
            entry = stat(place.store, place.path)
            if entry.is_directory:
                raise InvalidInputError(f"{place.url} is a directory", path=place.url)
        except TierfsError as error:
            return PlainTextResponse(
                f"{error}\n", 403 if isinstance(error, ReadOnlyError) else status_of({"kind": error.kind})
            )
        named = f"attachment; filename*=UTF-8''{quote(place.name, safe='')}"
        headers = {"Content-Disposition": named, "Content-Length": str(entry.length)}
        return StreamingResponse(content.pieces(place, entry), headers=headers, media_type="application/octet-stream")

    async def _events(self, _request: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        """Yield a view's state whenever it changes, and a sign of life every second."""
        seen: dict[int, int] = {}
        yield f"retry: 1000\nevent: hello\ndata: {json.dumps({'server': _ID})}\n\n"
        tick = 0
        while not self.is_closing:
            for view in self._views:
                view.watch()
                if seen.get(view.number) != view.version:
                    seen[view.number] = view.version
                    state = {**view.status(), "list": [view.list.version, view.list.looked, view.list.found]}
                    yield f"event: store\ndata: {json.dumps(state, separators=(',', ':'))}\n\n"
            if tick % BEAT_TICKS == 0:
                yield "event: beat\ndata: 1\n\n"
            tick += 1
            await asyncio.sleep(TICK_S)


def merged(expositions: Iterable[str]) -> str:
    """Return one exposition for several stores: Prometheus accepts the head of a metric once."""
    families: dict[str, str] = {}
    for text in expositions:
        for family in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE)[1:]:
            help_line, type_line, samples = family.split("\n", 2)
            head = f"{help_line}\n{type_line}\n"
            families[head] = families.get(head, "") + samples
    return "".join(head + samples for head, samples in families.items())


class _PageServer(uvicorn.Server):
    """A server that says where it listens, and ends its event streams before it ends."""

    should_exit: bool
    force_exit: bool

    def __init__(self, config: uvicorn.Config, page: Page, started: Callable[[int], object]) -> None:
        super().__init__(config)
        self._page = page
        self._started_at = started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after SIGTERM or Ctrl-C as after a command that is done, and at once after the second one."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._started_at(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._page.is_closing = True
        await super().shutdown(sockets)


def serve(
    urls: Sequence[str],
    rules: Sequence[Rule],
    *,
    host: str,
    port: int,
    max_age_s: float,
    allow_hosts: Sequence[str],
    allow_download: bool,
    wants_token: bool,
    opens: bool,
    say: Callable[[str], object],
) -> None:
    """Serve the page until SIGTERM or Ctrl-C.

    Args:
        urls: The stores, or directories in them, that the page shows.
        rules: What to keep, for the reasons in the list.
        host: The address to listen at.
        port: The TCP port; 0 for any free one.
        max_age_s: Seconds for which a change may wait for the object tier without an alarm.
        allow_hosts: Further names of this server.
        allow_download: Whether files may be downloaded.
        wants_token: Whether a token is needed also where only this machine can ask.
        opens: Whether to open the page in a browser.
        say: Gets the URL of the page when the server listens.

    Raises:
        InvalidInputError: The address cannot be used.
    """
    views = [StoreView(number, url, rules, max_age_s) for number, url in enumerate(urls)]
    page = Page(views, allow_download=allow_download)
    is_local = is_loopback(host)
    token = secrets.token_urlsafe(24) if wants_token or allow_download or not is_local else None
    hosts = known_hosts(host, tuple(allow_hosts))
    app = Starlette(
        routes=page.routes(),
        middleware=[
            Middleware(Guard, hosts=hosts, remote=not is_local, token=token),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4),
        ],
    )

    def started(port: int) -> None:
        name = socket.getfqdn() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - it is compared
        url = f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"#token={token}" if token else "")
        say(url)
        if opens:
            webbrowser.open(url)

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    for view in views:
        view.start()
    try:
        _PageServer(config, page, started).run()
    except SystemExit as stop:
        raise InvalidInputError(f"{host}:{port} cannot be used: choose another --host or --port") from stop
    finally:
        for view in views:
            view.close()
