"""One browser for a module. Nothing may complain in its console."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

from browser import browsing


@pytest.fixture(scope="module")
def window():
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(window):
    window.size(1280, 900)
    window.complaints()
    yield window
    assert window.complaints() == []
