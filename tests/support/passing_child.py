"""A process that saves the states that another one staged, as DCP's does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def serve(conn: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            state, writer, url = conn.recv()
        except EOFError:
            return
        dcp.save(state, storage_writer=writer, checkpoint_id=url, no_dist=True)
        conn.send(url)
        del state
