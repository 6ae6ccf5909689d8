"""Detached errors can be kept and raised again without the frames that they passed through."""

import copyreg

import pytest

pytest.importorskip("torch")

from tierfs.device.transfer import CaptureMode, Transfer
from tierfs.errors import CapacityError, NotFoundError
from tierfs.gc_pause import detached


class Formatted(RuntimeError):
    """An error that formats its message from its argument."""

    def __init__(self, code):
        super().__init__(f"failed with {code}")
        self.code = code


class TwoArguments(RuntimeError):
    """An error whose constructor does not accept its own `args`."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Uncopied(RuntimeError):
    """An error whose `__new__` needs keyword arguments."""

    def __new__(cls, *args, **kwargs):
        if not kwargs:
            raise TypeError("key=value")
        return super().__new__(cls, *args)

    def __init__(self, **kwargs):
        super().__init__(f"failed with {kwargs}")


def caught(error, cause=None):
    try:
        raise error from cause
    except type(error) as raised:
        return raised


ERRORS = [
    Formatted(7),
    TwoArguments("this", "that"),
    Uncopied(code=7),
    CapacityError("full", tier="ram"),
    NotFoundError("gone", path="a"),
    OSError(2, "gone", "a"),
    UnicodeDecodeError("utf-8", b"a", 0, 1, "odd"),
    KeyError("a"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_of_a_copy_says_the_same_and_has_no_frames(error):
    message, attributes, args = str(error), dict(vars(error)), error.args
    first = detached(caught(error))
    assert first.__traceback__ is None
    again = detached(caught(first, caught(Formatted(1), caught(Formatted(2)))))
    assert (type(again), str(again), vars(again), again.args) == (type(error), message, attributes, args)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
    chain = [again, again.__cause__, again.__cause__.__cause__]
    assert [str(one) for one in chain[1:]] == ["failed with 1", "failed with 2"]
    assert all(one.__traceback__ is None and one.__context__ is None for one in chain)


def test_a_copy_has_no_frames_where_copies_keep_them(monkeypatch):
    def with_frames(error):
        return lambda *args: type(error)(*args).with_traceback(error.__traceback__), error.args

    monkeypatch.setitem(copyreg.dispatch_table, ValueError, with_frames)
    assert detached(caught(ValueError("odd"))).__traceback__ is None


def test_causes_in_a_circle_are_copied_once():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    made = detached(one)
    assert (str(made), str(made.__cause__), made.__cause__.__cause__) == ("one", "two", None)


def test_a_transfer_ends_though_its_tier_fails():
    class Failing:
        def give(self, *_, **__):
            raise RuntimeError("the tier is broken")

    nothing = {"pin": lambda: None, "fill": None, "fall_back": lambda *_: None}
    transfer = Transfer(CaptureMode.DEVICE, None, None, Failing(), **nothing)
    transfer.generation = object()
    with pytest.raises(RuntimeError, match="the tier is broken"):
        transfer.discard()
    assert transfer.is_done
