"""Errors of the operating system become tierfs' errors, grouped by what the caller does next."""

from __future__ import annotations

import errno
import os

import pytest

from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    TierfsError,
)
from tierfs.objects.os_errors import translate_os_error, translated


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOENT, NotFoundError),
        (errno.ENOTDIR, NotFoundError),
        (errno.EISDIR, NotFoundError),
        (errno.EEXIST, AlreadyExistsError),
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EACCES, ReadOnlyError),
        (errno.EPERM, ReadOnlyError),
        (errno.EROFS, ReadOnlyError),
        (errno.ENAMETOOLONG, StoreError),
        (errno.EIO, StoreError),
    ],
)
def test_each_number_has_its_error(number: int, expected: type[TierfsError]) -> None:
    translation = translate_os_error(OSError(number, os.strerror(number)), "run/a")
    assert type(translation) is expected
    assert translation.path == "run/a"
    assert "run/a" in str(translation)
    assert not getattr(translation, "transient", False)


@pytest.mark.parametrize("number", [errno.EINTR, errno.ESTALE])
def test_temporary_os_errors_are_transient(number: int) -> None:
    translation = translate_os_error(OSError(number, os.strerror(number)), "run/a")
    assert isinstance(translation, StoreError)
    assert translation.transient


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("run/a"), NotFoundError),
        (FileExistsError(), AlreadyExistsError),
        (PermissionError("no"), ReadOnlyError),
        (IsADirectoryError("run"), NotFoundError),
    ],
)
def test_errors_of_libraries_that_give_no_number_are_known_by_class(
    error: OSError, expected: type[TierfsError]
) -> None:
    assert type(translate_os_error(error, "run/a")) is expected


@pytest.mark.parametrize("error", [ConflictError("ours"), NotFoundError("ours too, and an OSError"), KeyError("a bug")])
def test_everything_else_goes_through_untouched(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, translated("run/a"):
        raise error
    assert caught.value is error
