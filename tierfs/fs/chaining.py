"""The parts of a filesystem that stands before another one in a URL, with every fsspec from 2025.9 on.

fsspec replaces the path of such a filesystem by the path of what follows it: ``/data/run`` for ``tierfs::file:///data/run``.
It does so for subclasses of ``ChainedFileSystem``, which came with 2025.10. Before, it does so for subclasses of its cache.
"""

from __future__ import annotations

from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import _Cached

try:
    from fsspec.implementations.chained import ChainedFileSystem
except ImportError:
    from fsspec.implementations.cached import CachingFileSystem as ChainedFileSystem

__all__ = ["Chained"]


class _Instances(_Cached):
    """Makes one instance for all URLs that differ in their paths alone, so that they share stores and caches."""

    def mro(cls) -> list[type]:  # noqa: N805 - of a metaclass
        """Put the marker last: of fsspec's cache, nothing is inherited that fsspec's other classes have."""
        order = [base for base in super().mro() if base not in {ChainedFileSystem, object}]
        return [*order, ChainedFileSystem, object]

    def __call__(cls, *args: Any, fo: str = "", **options: Any) -> Any:  # noqa: N805
        if options.get("target_protocol", "") is None:
            del options["target_protocol"]
        instance = super().__call__(*args, **options)
        instance._first = instance._first or fo
        return instance


class Chained(AsyncFileSystem, ChainedFileSystem, metaclass=_Instances):
    """An asynchronous filesystem that fsspec hands the rest of a chained URL to.

    Attributes:
        _first: The path that the first chained URL of this instance named; empty where none did.
    """

    _first = ""
    __getattribute__ = object.__getattribute__  # fsspec's cache has one of its own

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        # Keeps fsspec before 2026.3 from replacing the path of a URL that has one, by that of nothing.
        _, colon, rest = path.partition("://")
        return {"target_protocol": None} if colon and rest else {}
