"""``tierfs ui``: serve a web page of stores."""

from __future__ import annotations

import argparse
import importlib.util

from tierfs.cli.arguments import PLACE, command, without_json
from tierfs.errors import InvalidInputError
from tierfs.units import parse_time


@command(
    "ui",
    "serve a web page of stores: alarms, tiers, checkpoints, differences and files",
    """
    tierfs ui
    tierfs ui tierfs::s3://bucket/run --open
    tierfs ui s3://bucket/run --keep latest:3 --keep best:2:val_loss --port 9000
    tierfs ui /data/checkpoints --host 0.0.0.0 --allow-download
    """,
    {
        "urls URL*": f"{PLACE} (default: the stores in directories that this host has opened)",
        "--host ADDRESS=127.0.0.1": "address to listen at; a token is needed from other machines (default: 127.0.0.1)",
        "--port PORT:int=8420": "TCP port; 0 for any free one (default: 8420)",
        "--open": "open the page in a browser",
        "--keep RULE...": "show what `tierfs prune --keep RULE` would keep; may be given several times",
        "--max-age TIME=1h": "alarm if a change waits longer than this for the object tier (default: 1h)",
        "--token": "require a token also on this machine, where other users may reach the page",
        "--allow-download": "let the page download files; requires a token",
        "--allow-host NAME...": "further name of this server, as a proxy sends it; may be given several times",
    },
    without_json,
)
def run(arguments: argparse.Namespace) -> int:
    """Serve the page until SIGTERM or Ctrl-C."""
    from tierfs.checkpoint.retention import parse_rule  # noqa: PLC0415 - --help does not need it
    from tierfs.host.host import state_directory  # noqa: PLC0415
    from tierfs.host.local_state import local_stores  # noqa: PLC0415

    rules, max_age_s = [parse_rule(text) for text in arguments.keep], parse_time(arguments.max_age, "--max-age")
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise InvalidInputError("the page is served with starlette and uvicorn: pip install 'tierfs[ui]'")
    # The URLs of other stores are not known here.
    here = [] if arguments.urls else [each for each in local_stores(state_directory()) if not each.is_gone]
    urls = arguments.urls or [store.place for store in here if store.place.startswith("/")]
    if not urls:
        raise InvalidInputError("no store in a directory has been opened on this host: name one, as in `tierfs ui URL`")
    from tierfs.ui.server import serve  # noqa: PLC0415 - it loads starlette
    from tierfs.ui.view import StoreView  # noqa: PLC0415

    serve([StoreView(number, url, rules, max_age_s) for number, url in enumerate(urls)], arguments)
    return 0
