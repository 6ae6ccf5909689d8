"""The page in a real browser, while a store saves, drains, fails and recovers."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import browser as browsers

browsers.require()

import runs
from support.page import PageServer, served
from support.waiting import until

import tierfs
from tierfs.units import format_bytes

HERE = Path(__file__).parent
SHOWN_WITHIN_S = 3.0


@pytest.fixture(scope="module")
def tiers(state_of_its_own):
    """Local tiers for every process of the module: a store in a directory has no nvme tier by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERFS_RAM", "64MiB")
        patch.setenv("TIERFS_NVME", "128MiB")
        yield


def told(*words):
    """Return what a command prints as JSON."""
    command = [sys.executable, "-m", "tierfs.cli", *words, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def train(url, *numbers, **options):
    """Train in a process of its own, which ends before everything has reached the object tier.

    A flusher that runs would keep its options.
    """
    subprocess.run([sys.executable, "-m", "tierfs.cli", "flusher", "stop", url], capture_output=True, check=False)
    words = [f"{name}={value}" for name, value in options.items()]
    subprocess.run([sys.executable, str(HERE / "runs.py"), url, *map(str, numbers), *words], check=True)


@pytest.fixture(scope="module")
def url(tmp_path_factory, tiers):
    root = tmp_path_factory.mktemp("live") / "store"
    tierfs.init(str(root))
    train(f"tierfs::file://{root}/run", 10, 60, 10)
    assert told("wait", str(root), "--timeout", "60")
    return f"tierfs::file://{root}"


@pytest.fixture(scope="module")
def page(url):
    with served(url, "--keep", "latest:2", "--keep", "best:1:loss", "--max-age", "2s") as server:
        yield server


def test_the_rows_are_those_of_checkpoint_ls(browser, page, url):
    browser.open(page.url)
    browser.until("document.querySelectorAll('.line').length === 6 && !document.body.innerText.includes('Reading')")
    browser.until("document.querySelector('.line').innerText.includes('object')")
    listed = told("checkpoint", "ls", f"{url}/run", "--usage")["checkpoints"][::-1]
    browser.until(f"document.body.innerText.includes({json.dumps(format_bytes(listed[0]['stored']))})")
    rows = browser.cells("Checkpoints")
    assert [row["Step"].strip("↑↓ ") for row in rows] == [str(row["step"]) for row in listed]
    for name, key in (("Size", "size"), ("Stored", "stored")):
        assert [row[name] for row in rows] == [format_bytes(row[key]) for row in listed]
    assert [row["State"] for row in rows] == [row["state"] for row in listed]
    assert [row["Level"].strip() for row in rows] == [row["level"] for row in listed]
    rules = ("--keep", "latest:2", "--keep", "best:1:loss")
    pruned = told("prune", f"{url}/run", *rules, "--dry-run")["checkpoints"][::-1]
    assert [row["Why it is kept"] for row in rows] == [", ".join(one["reasons"]) or "would be pruned" for one in pruned]


def test_the_age_of_the_list_is_shown_and_grows(browser, page):
    browser.open(page.url)
    browser.until("document.querySelectorAll('.line').length >= 6")
    browser.until_text("[aria-label=Checkpoints] .title", "listed ")
    ages = set()
    until(lambda: ages.add(browser.text("[aria-label=Checkpoints] .title").partition("listed ")[2]) or len(ages) > 2)
    assert all(age.split(" ago")[0].endswith(" s") for age in ages), ages


def test_two_runs_have_a_column_and_single_files_a_table(browser, tmp_path, tiers):
    tierfs.init(str(tmp_path / "store"))
    url = f"tierfs::file://{tmp_path}/store"
    with served(url) as page:
        browser.open(page.url)
        browser.until_text("[aria-label=Checkpoints]", "No checkpoint is here yet")
        assert "Single files" not in browser.text("main")
        for run in ("one", "two"):
            train(f"{url}/{run}", 10, 20, 10, ack="object")
        with fsspec.open(f"{url}/three/last.ckpt", "wb", ack="object") as file:
            file.write(b"a checkpoint of Lightning")
        browser.until("document.querySelectorAll('[aria-label=Checkpoints] .line').length >= 4")
        browser.until_text("section[aria-label='Single files']", "three/last.ckpt")
        rows = browser.cells("Checkpoints")
        assert sorted((row["Run"], row["Step"].strip("↑↓ ")) for row in rows) == [
            (run, step) for run in ("one", "two") for step in ("10", "20")
        ]
        browser.driver.get("about:blank")


def test_a_checkpoint_that_has_gone_leaves_the_screen(browser, page, url):
    train(f"{url}/run", 5000, 5000, 10, ack="object")
    browser.open(page.url)
    shown = "[...document.querySelectorAll('.line')].some((one) => one.innerText.includes('5000'))"
    browser.until(shown)
    assert told("rm", "-r", f"{url}/run/step_5000")
    browser.until(f"!{shown}")


def test_tiers_show_the_figures_of_status(browser, page, url):
    browser.open(page.url)
    browser.until("document.querySelectorAll('.tier').length === 3")
    report = told("status", url)
    shown = browser.ask("[...document.querySelectorAll('.tier')].map((one) => one.innerText)")
    for text, tier in zip(shown, ("ram", "nvme"), strict=False):
        for key in ("used_bytes", "budget_bytes", "dirty_bytes", "clean_bytes"):
            assert format_bytes(report["tiers"][tier][key]) in text
    assert "empty" in browser.text(".chart .figures")


def test_a_save_appears_and_its_dots_fill_while_it_drains(browser, page, url):
    browser.open(page.url)
    browser.until("document.querySelectorAll('.line').length >= 6")
    before = browser.ask("document.querySelectorAll('.line').length")
    train(f"{url}/run", 1000, 1000, 10, bandwidth="200kB")
    browser.until(
        f"document.querySelectorAll('.line').length > {before} && [...document.querySelectorAll('.line')].some((one) => one.innerText.includes('1000'))"
    )
    seen = set()
    while "object 100 %" not in (text := browser.ask("document.querySelector('.line .dots').ariaLabel")):
        seen.add(text)
        time.sleep(0.1)
    assert any("object 100" not in text and "staged 100 %" in text for text in seen), seen
    browser.until_text(".chart .figures", "empty")


def put_back(away, tree):
    """Rename a directory to its old name. An upload that meets the moment makes directories there, which go."""
    shutil.rmtree(tree, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(away, tree)
    return not away.exists()


def test_a_failure_is_an_alarm_until_the_store_recovers(browser, page, url):
    browser.open(page.url)
    browser.until("document.querySelector('#alarms')?.innerText.length > 0")
    tree = Path(url.removeprefix("tierfs::file://")) / ".tierfs"
    away = tree.with_name("away")
    train(f"{url}/run", 2000, 2000, 10, bandwidth="100kB")
    os.rename(tree, away)
    try:
        browser.until("document.querySelector('#alarms').innerText.includes('The flush')")
        alarms = browser.text("#alarms")
        assert "attempt" in alarms
        assert "tierfs probe" in alarms
        browser.until_text("#alarms", "waited up to")
        assert browser.ask("document.querySelector('#alarms').ariaLive") == "polite"
    finally:
        until(lambda: put_back(away, tree))
    browser.until("!document.querySelector('#alarms').innerText.includes('The flush')")
    browser.until_text(".chart .figures", "empty")
    until(lambda: any("2000" in row["Step"] for row in browser.cells("Checkpoints")))


def test_content_and_difference_are_those_of_the_commands(browser, page, url):
    browser.open(f"{page.url}#/checkpoint?path=run/step_60")
    browser.until("document.querySelectorAll('[aria-label=Tensors] .line').length > 5")
    content = told("checkpoint", "show", f"{url}/run/step_60", "--codecs")
    shown = content["tensors"]
    rows = len(shown) + len(content["objects"])
    assert browser.ask("Number(document.querySelector('[aria-label=Tensors]').ariaRowCount)") == 1 + rows
    browser.work(
        "[...document.querySelectorAll('button')].find((one) => one.innerText === 'Show the encoding').click()"
    )
    browser.until("[...document.querySelectorAll('[role=columnheader]')].some((one) => one.innerText === 'Codec')")
    rows = browser.cells("Tensors")
    for row in rows[:10]:
        tensor = next(one for one in shown if one["name"] == row["Name"])
        assert row["Stored"] == format_bytes(tensor["stored"])
        assert row["Codec"] == " + ".join(tensor["codecs"])
        assert row["Shape"] == " \u00d7 ".join(map(str, tensor["shape"]))
    browser.open(f"{page.url}#/diff?a=run/step_10&b=run/step_60")
    browser.until("document.querySelectorAll('.cell').length > 0")
    found = told("checkpoint", "diff", f"{url}/run/step_10", f"{url}/run/step_60")
    assert browser.ask("document.querySelectorAll('.cell').length") == runs.LAYERS
    assert f"Equal\n{found['equal_count']}" in browser.text(".figures")
    norms = {each["name"]: each["relative"] for each in found["tensors"]}
    for row in browser.cells("Tensors that differ"):
        assert float(row["Relative L2"]) == pytest.approx(norms[row["Name"]], rel=0.01)


def test_a_run_and_its_files_are_shown(browser, page, url):
    browser.open(f"{page.url}#/run")
    browser.until("document.querySelectorAll('.chart canvas').length >= 5")
    titles = browser.ask("[...document.querySelectorAll('.chart strong')].map((one) => one.innerText)")
    assert titles[:2] == ["loss", "grad_norm"]
    assert "Time blocked per save" in titles
    browser.open(f"{page.url}#/files?path=run/step_60")
    browser.until("document.querySelectorAll('[aria-label=Files] .line').length > 2")
    listed = told("ls", f"{url}/run/step_60")["entries"]
    assert [row["Name"] for row in browser.cells("Files")] == [entry["name"] for entry in listed]
    assert [row["Size"] for row in browser.cells("Files")] == [format_bytes(entry["size"]) for entry in listed]
    browser.work(
        "[...document.querySelectorAll('.line')].find((one) => one.innerText.includes('.safetensors')).click()"
    )
    browser.until("document.querySelectorAll('[aria-label=\"Tensors in the file\"] .line').length > 5")


def test_everything_is_reached_by_the_keyboard(browser, page):
    from selenium.webdriver.common.keys import Keys

    browser.open(page.url)
    browser.until("document.querySelectorAll('.line').length >= 6")
    for _ in range(60):
        browser.press(Keys.TAB)
        if browser.ask("document.activeElement.classList.contains('line')"):
            break
    assert browser.ask("document.activeElement.classList.contains('line')")
    browser.press(Keys.ARROW_DOWN, Keys.SPACE, Keys.ARROW_DOWN, Keys.SPACE)
    assert browser.ask("document.querySelectorAll('.line[aria-selected=true]').length") == 2
    browser.press(Keys.ENTER)
    browser.until("location.hash.startsWith('#/checkpoint')")


def test_an_error_of_the_server_shows_and_goes(browser, url):
    server = PageServer(url, "--port", "0")
    try:
        browser.open(server.url)
        browser.until("document.querySelector('#live').innerText === 'live'")
        begun = time.monotonic()
        server.process.kill()
        server.process.wait()
        browser.until("!document.querySelector('#banner').hidden")
        assert time.monotonic() - begun < SHOWN_WITHIN_S
        server.process.stdout.close()
        again = PageServer(url, "--port", str(server.port))
        try:
            browser.until("document.querySelector('#banner').hidden")
            browser.until("document.querySelectorAll('.line').length >= 6")
        finally:
            browser.driver.get("about:blank")
            again.stop()
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.process.kill()
    refused = [message for message in browser.complaints() if "ERR_CONNECTION_REFUSED" not in message]
    assert [message for message in refused if "ERR_INCOMPLETE_CHUNKED" not in message] == []


@pytest.mark.parametrize(
    "where", ["#/", "#/run", "#/files", "#/checkpoint?path=run/step_60", "#/diff?a=run/step_10&b=run/step_60"]
)
@pytest.mark.parametrize("look", [(1600, False), (390, True)], ids=["wide-light", "phone-dark"])
def test_nothing_shuts_people_out(browser, page, where, look):
    browser.size(look[0], 900, dark=look[1])
    browser.open(f"{page.url}{where}")
    browser.until("document.querySelectorAll('.line, canvas, .cell').length > 0")
    assert browser.barriers() == []
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"


def test_the_token_in_the_url_becomes_a_cookie(browser, url):
    with served(url, "--token") as page:
        browser.open(page.url.partition("#")[0])
        browser.until_text("main", "open the URL")
        browser.complaints()  # the refusal is an error in the console
        browser.open(page.url)
        browser.until("document.querySelectorAll('.line').length > 0")
        assert page.token not in browser.ask("location.href")
        assert browser.ask("document.cookie") == ""
        browser.driver.delete_all_cookies()
        browser.driver.get("about:blank")
