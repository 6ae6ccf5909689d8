"""Mount a store as a directory of this host, for tools that need a path.

The package speaks the FUSE protocol to the kernel directly, without libfuse. It is callable:
``tierfs.mount(url, directory)`` calls its function `mount`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierfs.mount.mounting import Mount, mount, unmount

__all__ = ["Mount", "mount", "unmount"]


class _Package(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.mount(*arguments, **options)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tierfs.mount import mounting  # noqa: PLC0415 - the process that serves does not need it

        return getattr(mounting, name)
    raise AttributeError(f"module 'tierfs.mount' has no attribute {name!r}")
