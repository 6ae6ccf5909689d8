"""Fork flushers from a server process that has imported their modules, but not torch.

Starting Python takes longer than all the work of a flusher in these tests.
"""

import os
import sys

from support.zygote import Zygote
from tierfs.cli.app import main
from tierfs.host.rpc import launch
from tierfs.host.rpc.launch import Launched, _open_log

zygote = Zygote(
    "tierfs.cli.commands.flusher",
    "tierfs.flusher.engine",
    "tierfs.peers.peering",
    "tierfs.flusher.publish",
    "tierfs.flusher.server",
    "tierfs.session.open",
    "tierfs.session.tiers",
    "tierfs.store.encode.keyframes",
)


def spawn(argv, log):
    """Start a flusher. Replaces `tierfs.host.rpc.launch.spawn`."""
    if os.getpid() != zygote.owner:
        return launch.spawn(argv, log)
    os.close(_open_log(log))
    start = log.stat().st_size
    process = zygote.start(run, argv[3:], str(log), daemon=True)
    return _Forked(process, log, start)


class _Forked(Launched):
    def __init__(self, process, log, log_start):
        super().__init__(process.pid, log, log_start)
        self._process = process

    def status(self):
        return self._process.exitcode


def run(words, log):
    """Run a command of tierfs in a session of its own. Its output goes to the end of a file."""
    os.setsid()
    os.chdir("/")
    descriptor = os.open(log, os.O_APPEND | os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.exit(main(words))
