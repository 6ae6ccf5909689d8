"""The pictures of the page in the documents. TIERFS_DRAW_PICTURES=1 replaces them by what the page looks like now."""

import base64
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import browser as browsers

browsers.require()

import runs
from support.page import served

import tierfs
from tierfs.cli import main
from tierfs.session import open_store, parse_url
from tierfs.store import save

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "pictures"
BYTES_MAX = 100_000
SHOTS = {
    "ui-light": (1280, 960, False, "#/"),
    "ui-dark": (1280, 960, True, "#/"),
    "ui-phone": (390, 844, True, "#/"),
    "ui-diff": (1280, 800, False, "#/diff?a=run/step_2000&b=run/step_4000"),
    "ui-run": (1280, 700, False, "#/run"),
}


@pytest.fixture(scope="module")
def page(state_of_its_own, tmp_path_factory):
    """A run of twenty saves. The last one drains slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERFS_RAM", "64MiB")
        patch.setenv("TIERFS_NVME", "256MiB")
        root = tmp_path_factory.mktemp("pictures") / "checkpoints"
        tierfs.init(str(root))
        url = f"tierfs::file://{root}"
        runs.train(f"{url}/run", 200, 4000, 200)
        save(open_store(parse_url(url))[0], "run/step_1000/.pinned", b"")
        assert main(["wait", url, "--timeout", "120"]) == 0
        assert main(["flusher", "stop", url]) == 0
        with served(url, "--keep", "latest:3", "--keep", "best:2:loss", "--keep", "every:1000") as server:
            server.get("checkpoints")
            command = [sys.executable, str(HERE / "runs.py"), f"{url}/run", "4200", "4200", "200", "bandwidth=60kB"]
            subprocess.run(command, check=True)
            yield server


@pytest.mark.parametrize("name", SHOTS)
def test_a_picture_shows_the_page(browser, page, name):
    width, height, dark, where = SHOTS[name]
    browser.size(width, height, dark=dark)
    browser.open(f"{page.url}{where}")
    browser.until(
        "document.querySelectorAll('.line, canvas, .cell').length > 2 && document.querySelector('#live').innerText !== 'offline'"
    )
    time.sleep(4)  # until the chart of the last minutes has a line
    taken = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 75})
    picture = base64.b64decode(taken["data"])
    if where_png := os.environ.get("TIERFS_LOOK"):
        browser.driver.save_screenshot(f"{where_png}/{name}.png")
    assert len(picture) < BYTES_MAX
    if os.environ.get("TIERFS_DRAW_PICTURES"):
        (PICTURES / f"{name}.webp").write_bytes(picture)
    assert (PICTURES / f"{name}.webp").exists(), "draw it: TIERFS_DRAW_PICTURES=1"
