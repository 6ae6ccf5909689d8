"""`tierfs.units`: parse sizes and shares as people write them."""

import pytest

from tierfs.errors import InvalidInputError
from tierfs.units import bounded_timeout, parse_share, parse_size


@pytest.mark.parametrize(
    ("text", "share"),
    [("25%", 250), ("0%", 0), ("100%", 1000), ("12.5 %", 125), (" 0.1%", 1), ("0.05%", 0), ("100.0%", 1000)],
)
def test_a_percentage_is_a_share_of_the_whole(text, share):
    assert parse_share(text, 1000) == share


def test_a_share_is_exact_however_large_the_whole():
    whole = 10**24 + 3
    assert parse_share("33.3%", whole) == whole * 333 // 1000


@pytest.mark.parametrize("text", ["8GiB", "10M", "512", 0, 4096, "0"])
def test_a_size_is_no_share_of_anything(text):
    assert parse_share(text, 1000) == parse_size(text)


@pytest.mark.parametrize("text", ["100.1%", "101%", "999%"])
def test_a_share_of_more_than_all_is_refused(text):
    with pytest.raises(InvalidInputError, match="more than 100%"):
        parse_share(text, 1000)


@pytest.mark.parametrize("text", ["-1%", "%", "1e2%", "25%%", ".5%", "5.%", "", "half", "٣%", b"1", [1], None, True])
def test_a_text_that_is_no_size_or_share_is_refused(text):
    with pytest.raises(InvalidInputError, match="not a size"):
        parse_share(text, 1000)


def test_a_whole_float_is_a_size():
    assert parse_size(1e9) == 10**9


@pytest.mark.parametrize("number", [-1, -0.5, 1.5, float("inf"), float("nan"), True])
def test_a_number_that_is_no_size_is_refused(number):
    with pytest.raises(InvalidInputError, match="not a size"):
        parse_share(number, 1000)


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, None])
def test_a_timeout_without_an_end_is_no_limit(seconds):
    assert bounded_timeout(seconds) is None


def test_a_timeout_that_is_no_number_is_refused():
    assert bounded_timeout(0.0) == 0
    with pytest.raises(InvalidInputError, match="nan"):
        bounded_timeout(float("nan"))
