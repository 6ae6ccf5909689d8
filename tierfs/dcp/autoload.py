"""torch calls this at the end of its import, through tierfs' entry point in ``torch.backends``: see decision 15.

It is called wherever tierfs is installed, so it loads nothing unless it is asked to.
"""

from __future__ import annotations

import os

__all__ = ["torch_imported"]


def torch_imported() -> None:
    """Do what ``TIERFS_DCP=1`` asks for: `tierfs.dcp.install`.

    Raises:
        InvalidInputError: The value is neither yes nor no, or this torch cannot be changed so. torch reports it as a
            backend that failed to load, and is not imported.
    """
    said = os.environ.get("TIERFS_DCP", "").lower()
    if said in ("", "0", "false", "no", "off"):
        return
    from tierfs.dcp.installing import install  # noqa: PLC0415 - it takes most of a second
    from tierfs.errors import InvalidInputError  # noqa: PLC0415
    from tierfs.session.url import TRUE  # noqa: PLC0415

    if said not in TRUE:
        raise InvalidInputError(f"TIERFS_DCP={said}: set it to 1 or to 0")
    install()
