"""A headless Chromium that a test drives through chromedriver, and axe-core, which looks for what shuts people out.

axe-core comes from npm into this user's cache, as azurite does. It never becomes a part of tierfs.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

AXE = "axe-core-4.14.1"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierfs-test-servers"
PATIENCE_S = 60.0
# What counts: the rules of WCAG 2.2 up to level AA.
_RUN_AXE = """
const done = arguments[arguments.length - 1];
axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})
  .then((found) => done(found.violations.map((one) => [one.impact, one.id, one.nodes.map((node) => node.html.slice(0, 160))])));
"""


def require():
    """Skip the module if something that the browser needs is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed: integration/requirements.txt has it")
    pytest.importorskip("uvicorn", reason="the extra tierfs[ui] is not installed")
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing: Debian has it as {package}", allow_module_level=True)


def axe_source():
    """Return axe-core's program. Skip the test if npm cannot fetch it."""
    kept = _CACHE / f"{AXE}.js"
    if not kept.exists():
        if shutil.which("npm") is None:
            pytest.skip("axe-core is fetched by npm, which is missing")
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as directory:
            wanted = AXE.replace("core-", "core@")
            if subprocess.run(["npm", "pack", "--silent", wanted], cwd=directory, check=False, timeout=120).returncode:
                pytest.skip("npm cannot fetch axe-core")
            with tarfile.open(Path(directory) / f"{AXE}.tgz") as packed:
                packed.extract("package/axe.min.js", directory, filter="data")
            os.replace(Path(directory) / "package/axe.min.js", kept)
    return kept.read_text()


class Browser:
    """One window of a headless Chromium."""

    def __init__(self):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
            options.add_argument(f"--{word}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_script_timeout(PATIENCE_S)
        self.size(1280, 900)

    def size(self, width, height, *, dark=False):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, url):
        self.driver.get("about:blank")  # so that only the fragment of a URL may differ
        self.driver.get(url)

    def ask(self, expression):
        """Return the value of an expression of JavaScript."""
        return self.driver.execute_script(f"return {expression}")

    def work(self, body):
        """Run the body of an asynchronous function, and return its result."""
        script = f"const done = arguments[arguments.length - 1]; (async () => {{ {body} }})().then(done)"
        return self.driver.execute_async_script(script)

    def until(self, expression):
        """Wait until an expression is true, and return its value."""
        ends = time.monotonic() + PATIENCE_S
        while not (found := self.ask(expression)):
            assert time.monotonic() < ends, (expression, self.text("body")[:3000], self.complaints())
            time.sleep(0.05)
        return found

    def text(self, selector):
        return self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def until_text(self, selector, text):
        self.until(f"(document.querySelector({json.dumps(selector)})?.innerText ?? '').includes({json.dumps(text)})")

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def cells(self, label):
        """Return the texts of the rows in sight of a table, by the heads of its columns."""
        return self.ask(
            f"""(() => {{
            const grid = document.querySelector(`[role=grid][aria-label="{label}"]`);
            const heads = [...grid.querySelectorAll('[role=columnheader]')].map((one) => one.innerText.trim());
            const lines = [...grid.querySelectorAll('.line')].sort((a, b) => a.ariaRowIndex - b.ariaRowIndex);
            return lines.map((line) => Object.fromEntries([...line.children].map((cell, at) => [heads[at], cell.innerText])));
            }})()"""
        )

    def complaints(self):
        """Return the errors and warnings in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in {"SEVERE", "WARNING"}]

    def barriers(self):
        """Return what axe-core finds that is serious or critical."""
        # Its own fonts and styles would be refused by the page's policy: the program is evaluated by the driver.
        self.driver.execute_script(axe_source())
        found = self.driver.execute_async_script(_RUN_AXE)
        return [each for each in found if each[0] in {"serious", "critical"}]


@contextlib.contextmanager
def browsing():
    browser = Browser()
    try:
        yield browser
    finally:
        browser.driver.quit()
