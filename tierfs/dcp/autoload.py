"""The function that torch calls at the end of its import: tierfs's entry point in ``torch.backends``.

See docs/decisions/0015-torch-calls-tierfs-at-its-import.md. torch calls it wherever tierfs is installed, so it loads
nothing unless the user asks for it.
"""

from __future__ import annotations

import os


def torch_imported() -> None:
    """Call `tierfs.dcp.install` if ``TIERFS_DCP`` is 1.

    Raises:
        InvalidInputError: The value of ``TIERFS_DCP`` is invalid, or this torch cannot be changed. torch reports a
            backend that failed to load, and its import fails.
    """
    said = os.environ.get("TIERFS_DCP", "").lower()
    if said in ("", "0", "false", "no", "off"):
        return
    from tierfs.dcp.installing import install  # noqa: PLC0415 - importing it takes most of a second
    from tierfs.errors import InvalidInputError  # noqa: PLC0415
    from tierfs.session.url import TRUE  # noqa: PLC0415

    if said not in TRUE:
        raise InvalidInputError(f"TIERFS_DCP={said}: set it to 1 or to 0")
    install()
