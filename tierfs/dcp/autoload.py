"""The function that torch calls at the end of its import: tierfs's entry point in ``torch.backends``.

See docs/decisions/0015-torch-calls-tierfs-at-its-import.md. torch calls it wherever tierfs is installed, so it loads
nothing unless the user asks for it. The module keeps its name: an editable install of an older clone names it.
"""

from __future__ import annotations

import logging
import os


def torch_imported() -> None:
    """Call `tierfs.dcp.install` if ``TIERFS_DCP`` is 1. A failure is logged, since torch's import would fail with it."""
    said = os.environ.get("TIERFS_DCP", "").lower()
    if said in ("", "0", "false", "no", "off"):
        return
    try:
        from tierfs.dcp.installing import install  # noqa: PLC0415 - importing it takes most of a second
        from tierfs.session.url import TRUE  # noqa: PLC0415

        if said not in TRUE:
            raise ValueError(f"TIERFS_DCP={said}: set it to 1 or to 0")
        install()
    except Exception as error:  # noqa: BLE001 - whatever it is, programs without a checkpoint go on
        logging.getLogger("tierfs.dcp").warning("torch's saves and loads by a tierfs URL do not use tierfs: %s", error)
