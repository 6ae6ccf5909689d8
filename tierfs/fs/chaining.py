"""The base class of a filesystem that precedes another one in a chained URL, for fsspec from 2025.9 on.

fsspec gives such a filesystem the path of the filesystem behind it: ``/data/run`` for
``tierfs::file:///data/run``. It does this for subclasses of ``ChainedFileSystem``, which is new in 2025.10.
Earlier, it does this for subclasses of ``CachingFileSystem``.
"""

from __future__ import annotations

from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import _Cached

try:
    from fsspec.implementations.chained import ChainedFileSystem
except ImportError:
    from fsspec.implementations.cached import CachingFileSystem as ChainedFileSystem


class _Instances(_Cached):
    """Makes one instance for all URLs that differ only in their paths, so that these share stores and caches."""

    def mro(cls) -> list[type]:  # noqa: N805 - of a metaclass
        """Put `ChainedFileSystem` last, so that methods of fsspec's other classes take precedence over its own."""
        order = [base for base in super().mro() if base not in {ChainedFileSystem, object}]
        return [*order, ChainedFileSystem, object]

    def __call__(cls, *args: Any, fo: str = "", **options: Any) -> Any:  # noqa: N805
        if options.get("target_protocol", "") is None:
            del options["target_protocol"]
        instance = super().__call__(*args, **options)
        instance._first = instance._first or fo
        return instance


class Chained(AsyncFileSystem, ChainedFileSystem, metaclass=_Instances):
    """An asynchronous filesystem to which fsspec passes the rest of a chained URL.

    Attributes:
        _first: The path in the first chained URL of this instance. Empty if no URL had one.
    """

    _first = ""
    __getattribute__ = object.__getattribute__  # `CachingFileSystem` overrides it

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        # Otherwise fsspec before 2026.3 replaces the path of an unchained URL by an empty path.
        _, colon, rest = path.partition("://")
        return {"target_protocol": None} if colon and rest else {}
