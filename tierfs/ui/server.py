"""The HTTP server of the page: routes, events, and the process."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import secrets
import socket
import threading
import time
import webbrowser
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tierfs import __version__
from tierfs.checkpoint.retention import Rule, parse_rule
from tierfs.cli.arguments import require_torch
from tierfs.cli.commands._status_prometheus import exposition
from tierfs.cli.commands.status import age
from tierfs.cli.commands.stores import decision_document
from tierfs.cli.files.places import StorePlace
from tierfs.cli.terminal.output import describe
from tierfs.errors import InvalidInputError, NotFoundError, ReadOnlyError, TierfsError
from tierfs.format.keys import is_at_or_below
from tierfs.threads import start_daemon
from tierfs.ui.files import directory, pieces, preview
from tierfs.ui.security import Guard, is_loopback
from tierfs.ui.view import StoreView
from tierfs.units import format_bytes

KEPT_MAX = 32
ABANDONED_S = 15.0  # a job that no client has asked for in this time ends at its next step
WAIT_S = 1.0  # of a request for the result, before it gets the progress instead
ROWS_MAX = 500
_ALARMS = ("severity", "what", "do", "command")
_TIERS = ("tier", "used_bytes", "budget_bytes", "dirty_bytes", "clean_bytes", "gives")
_CHECKPOINTS = ("name", "step", "state", "level", "size", "stored", "kind", "created")
_FILES = ("name", "level", "size", "modified")
_SIZES = {*_TIERS[1:5], "size", "stored"}
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tierfs</title>
<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/static/style.css"></head>
<body class="plain"><main><p><a href="/">The page with live figures</a></p>"""
TICK_S, BEAT_TICKS = 0.5, 2  # every second an event stream says that the server lives
TIMED_MAX = 200  # checkpoints whose own records of times are read: each takes a few requests
DIGITS_MAX = 18
METRICS_TYPE = "text/plain; version=0.0.4"
STATUSES = {"not-found": 404, "store-not-found": 404, "invalid-input": 400, "read-only": 403, "store": 503}
_ID = secrets.token_hex(8)
"""The id of this process: the page loads everything again when it changes."""


Task: TypeAlias = "Callable[[Job], dict[str, Any]]"


class Job:
    """One piece of work, and its result or error."""

    def __init__(self) -> None:
        self.done = self.total = 0  # in bytes or items
        self.result: Future[dict[str, Any]] = Future()
        self.asked_s = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count finished work. Raises `CancelledError` if no client waits for the rest."""
        self.done += count
        if time.monotonic() - self.asked_s > ABANDONED_S:
            raise CancelledError

    def run(self, task: Task, turn: threading.Lock) -> None:
        """Do the work when it is its turn."""
        try:
            with turn:
                self.advance(0)
                self.result.set_result(task(self))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks
            self.result.set_exception(error)


class Jobs:
    """Runs one job at a time, and keeps the results of the last `KEPT_MAX` ones."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Hashable, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def answer(self, key: Hashable, task: Task) -> tuple[int, dict[str, Any]]:
        """Return an HTTP status and the result, or after `WAIT_S` seconds the progress. A failed job is done again.

        Raises:
            TierfsError, OSError: Raised by the job.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (job.result.done() and job.result.exception()):
                job = self._jobs[key] = Job()
                start_daemon(job.run, task, self._turn, name="ui-job")
            self._jobs.move_to_end(key)
            while len(self._jobs) > KEPT_MAX:
                self._jobs.popitem(last=False)
        job.asked_s = time.monotonic()
        try:
            return 200, job.result.result(WAIT_S)
        except FutureTimeoutError:
            return 202, {"running": True, "done": job.done, "total": job.total}


def plain_page(stores: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return the page for stores, each with its status and its list of checkpoints."""
    return _HEAD + "".join(_store(*store) for store in stores) + "</main></body></html>"


def _store(status: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    report, rows, age_s = status["report"], listed["checkpoints"], listed["age_s"]
    tiers = [{"tier": tier, **values} for tier, values in report["tiers"].items()] if report else []
    queue = "What waits for the object tier is not known yet."
    if report:
        queue = f"{report['queue_files']} files, {format_bytes(report['queue_bytes'])} wait for the object tier."
    more = "The list of checkpoints is being read: load this page again"
    if age_s is not None:
        more = f"{len(rows)} checkpoints, listed {age(age_s)} ago"
        more += f", of which these are the first {ROWS_MAX}" if len(rows) > ROWS_MAX else ""
    tables = [("Alarms", _ALARMS, status["alarms"]), ("Tiers", _TIERS, tiers), (more, _CHECKPOINTS, rows[:ROWS_MAX])]
    if listed["files"]:
        tables.append(("Single files", _FILES, listed["files"]))
    return f"<h1>{escape(status['url'])}</h1><p>{queue}</p>" + "".join(_table(*each) for each in tables)


def _table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{name.removesuffix("_bytes")}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(_cell(row.get(name), name) for name in columns)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any, name: str) -> str:
    text = "" if value is None else format_bytes(value) if name in _SIZES else str(value)
    return f"<td>{escape(text)}</td>"


STATIC = Path(__file__).parent / "static"


class Page:
    """The routes of the server."""

    def __init__(self, views: Sequence[StoreView], *, allow_download: bool) -> None:
        self._views, self._allow_download = views, allow_download
        self._jobs = Jobs()
        self.is_closing = False

    def routes(self) -> list[Route | Mount]:
        about = {"version": __version__, "server": _ID, "allow_download": self._allow_download}
        answers: dict[str, Callable[[Request], Response]] = {
            "/": lambda _: FileResponse(STATIC / "index.html"),
            "/plain": lambda _: HTMLResponse(plain_page([one.plain() for one in self._views])),
            "/metrics": lambda _: Response(exposition(*(one.report() for one in self._views)), media_type=METRICS_TYPE),
            "/download": self._download,
            "/api/stores.json": lambda _: _json({**about, "stores": [view.status() for view in self._views]}),
            "/api/status.json": lambda request: _json(self._view(request).report()),
            "/api/checkpoints.json": self._checkpoints,
            "/api/prune.json": self._prune,
            "/api/checkpoint.json": self._checkpoint,
            "/api/diff.json": self._diff,
            "/api/times.json": self._times,
            "/api/files.json": lambda request: _json(directory(self._place(request))),
            "/api/preview.json": lambda request: _json(preview(self._place(request))),
        }
        routes = [Route(path, _with_errors(answer)) for path, answer in answers.items()]
        return [*routes, Route("/api/events", self._events), Mount("/static", StaticFiles(directory=STATIC))]

    def _view(self, request: Request) -> StoreView:
        number = _number(request.query_params.get("store", "0"))
        if number >= len(self._views):
            raise NotFoundError(f"there is no store {number} on this page: /api/stores.json lists them")
        self._views[number].watch()
        return self._views[number]

    def _place(self, request: Request, name: str = "path") -> StorePlace:
        """Return the place at the path in a parameter of the request. It is at or below the URL of the view."""
        top = self._view(request).open()
        path = request.query_params.get(name, top.path)
        if not is_at_or_below(path, top.path):
            raise NotFoundError(f"{path!r} is not at or below {top.url}", path=path)
        return top.child(top.relative(path))

    def _checkpoints(self, request: Request) -> Response:
        view = self._view(request)
        given = (request.query_params.get(name) for name in ("since", "limit"))
        since, limit = (None if text is None else _number(text) for text in given)
        rows = view.checkpoints(since, limit, request.query_params.getlist("row"))
        return _json({"url": view.open().url, **rows})

    def _prune(self, request: Request) -> Response:
        view = self._view(request)
        rules: list[Rule] = [parse_rule(text) for text in request.query_params.getlist("keep")] or [*view.list.rules]
        place = view.open()
        found = [decision_document(each) for each in view.list.decisions(place, rules)]
        return _json({"url": place.url, "dry_run": True, "checkpoints": found})

    def _checkpoint(self, request: Request) -> Response:
        place, codecs = self._place(request), request.query_params.get("codecs") == "1"
        return self._work(request, f"show {codecs}", [place], lambda of, job: of.show(place, job, codecs=codecs))

    def _diff(self, request: Request) -> Response:
        a, b = (self._place(request, name) for name in ("a", "b"))
        return self._work(request, "diff", [a, b], lambda of, job: of.diff(a, b, job))

    def _times(self, request: Request) -> Response:
        top = self._place(request)
        rows = self._view(request).list.changes(0)["checkpoints"]
        whole = [row["path"] for row in rows if row["state"] == "complete" and is_at_or_below(row["path"], top.path)]
        places = [top.child(top.relative(path)) for path in whole[:TIMED_MAX]]
        return self._work(request, "times", places, lambda of, job: of.times(places, job))

    def _work(
        self, request: Request, what: str, places: Sequence[StorePlace], task: Callable[[Any, Any], dict[str, Any]]
    ) -> Response:
        """Answer with the result of a job about checkpoints, or with its progress."""
        require_torch("checkpoints are read")
        known = self._view(request).list
        key = (what, *((place.url, known.roots_of(place.path)) for place in places))
        # Importing it loads torch, which takes seconds.
        answer = self._jobs.answer(key, lambda job: task(importlib.import_module("tierfs.ui.content"), job))
        return _json(answer[1], answer[0])

    def _download(self, request: Request) -> Response:
        if not self._allow_download:
            raise ReadOnlyError("downloads are off: start `tierfs ui` with --allow-download")
        place = self._place(request)
        entry = place.entry()
        if entry.is_directory:
            raise InvalidInputError(f"{place.url} is a directory", path=place.url)
        named = f"attachment; filename*=UTF-8''{quote(place.name, safe='')}"
        headers = {"Content-Disposition": named, "Content-Length": str(entry.length)}
        return StreamingResponse(pieces(place, entry), headers=headers, media_type="application/octet-stream")

    async def _events(self, _request: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        """Yield the state of a view whenever it changes, and a sign of life every second."""
        seen: dict[int, object] = {}
        yield f"retry: 1000\n{_event('hello', {'server': _ID})}"
        tick = 0
        while not self.is_closing:
            for view in self._views:
                view.watch()
                listed = [view.list.version, view.list.looked, view.list.found, view.listings]
                if seen.get(view.number) != (now := (view.version, *listed)):
                    seen[view.number] = now
                    state = {**view.status(), "list": listed}
                    yield _event("store", {**state, "history": state["history"][-1:]})
            if tick % BEAT_TICKS == 0:
                yield _event("beat", tick)
            tick += 1
            await asyncio.sleep(TICK_S)


def _number(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > DIGITS_MAX:
        raise InvalidInputError(f"{text[:DIGITS_MAX]!r} is not a number: give one of up to {DIGITS_MAX} digits")
    return int(text)


def _dumps(document: object) -> str:
    """Return JSON as browsers read it, with "NaN" and "Infinity" as texts."""
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(document), parse_constant=str), separators=(",", ":"))


def _json(document: object, code: int = 200) -> Response:
    return Response(_dumps(document), code, media_type="application/json")


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {_dumps(data)}\n\n"


def _with_errors(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Answer with the error of a store as the commands report it."""

    def respond(request: Request) -> Response:
        try:
            return answer(request)
        except (TierfsError, OSError) as error:
            failure = describe(error)
            document = {"kind": failure.kind, "message": failure.message, "path": failure.path}
            return _json({"error": document}, STATUSES.get(failure.kind, 500))

    return respond


class _PageServer(uvicorn.Server):
    """A server that says where it listens, and ends its event streams before it ends."""

    should_exit: bool
    force_exit: bool

    def __init__(self, config: uvicorn.Config, page: Page, started: Callable[[int], object]) -> None:
        super().__init__(config)
        self._page, self._say_started = page, started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after SIGTERM or Ctrl-C as after a command that is done, and at once after the second one."""
        self.force_exit = self.should_exit
        self.should_exit = self._page.is_closing = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._say_started(self.servers[0].sockets[0].getsockname()[1])


def serve(views: Sequence[StoreView], arguments: argparse.Namespace) -> None:
    """Serve the page until SIGTERM or Ctrl-C. ``arguments`` are those of the command.

    Raises:
        InvalidInputError: The address cannot be used.
    """
    if not 0 <= arguments.port < 1 << 16:
        raise InvalidInputError(f"--port {arguments.port}: give a port from 0 to 65535")
    page, host = Page(views, allow_download=arguments.allow_download), arguments.host
    needs_token = arguments.token or arguments.allow_download or not is_loopback(host)
    token = secrets.token_urlsafe(24) if needs_token else None
    guard = Middleware(Guard, host=host, allowed=arguments.allow_host, token=token)
    pack = Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)
    app = Starlette(routes=page.routes(), middleware=[guard, pack])

    def started(port: int) -> None:
        name = socket.getfqdn() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - it is compared
        url = f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"#token={token}" if token else "")
        print(f"{url}  (Ctrl-C ends it)", flush=True)
        if arguments.open:
            webbrowser.open(url)

    settings = {"log_level": "warning", "access_log": False, "server_header": False, "timeout_graceful_shutdown": 2}
    for view in views:
        view.start()
    try:
        _PageServer(uvicorn.Config(app, host=host, port=arguments.port, **settings), page, started).run()
    except SystemExit as stop:
        raise InvalidInputError(f"{host}:{arguments.port} cannot be used: choose another --host or --port") from stop
