"""The interface is what the kept list says: names, signatures, defaults, options, exit codes, keys, variables, metrics."""

import runpy
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[1] / "docs" / "reference"


@pytest.fixture(scope="module")
def written():
    return runpy.run_path(str(PAGES / "interface.py"))


def test_the_interface_is_the_one_of_the_kept_list(written):
    kept, now = ((PAGES / "interface.txt").read_text().splitlines(), written["text"]().splitlines())
    gone, new = (sorted(set(a) - set(b)) for a, b in ((kept, now), (now, kept)))
    assert not gone, "docs/reference/stability.md says how a name goes"
    assert not new, "run docs/reference/interface.py"
    assert kept == now


def test_a_changed_default_or_a_missing_parameter_is_seen(written):
    def before(path, *, mode="rb"): ...

    def after(path, *, mode="wb"): ...

    assert written["signature"](before) == "(path, *, mode='rb')"
    assert written["signature"](after) != written["signature"](before)


def test_every_plug_and_package_is_stable_or_experimental(written):
    marked = {*written["STABLE"], *written["STABLE_PLUGS"], *written["EXPERIMENTAL"], *written["EXPERIMENTAL_PLUGS"]}
    root = PAGES.parents[1] / "tierfs"
    parts = {"tierfs.plugs.trainer", "tierfs.plugs.scratch", "tierfs.plugs.pretrained"}  # of other plugs
    found = {
        f"tierfs.{folder}.{path.stem}" for folder in ("plugs", "experimental") for path in (root / folder).glob("*.py")
    }
    assert {name for name in found if not name.endswith("__")} - parts <= marked
