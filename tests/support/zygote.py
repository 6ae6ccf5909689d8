"""Fork processes from a server that has imported their modules: starting Python takes longer than most of their work."""

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import threading
from multiprocessing import forkserver

_swapped = threading.Lock()


class Zygote:
    """A fork server with its own modules. That of `multiprocessing` has those of whoever set them first.

    It starts with the first process. Processes must not be started in a fork of this process.

    Args:
        modules: What the server imports. Modules of other packages may be missing.
    """

    def __init__(self, *modules):
        for module in modules:
            assert not module.startswith("tierfs") or importlib.util.find_spec(module), module
        self.context = multiprocessing.get_context("forkserver")
        self.owner = os.getpid()
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(modules))

    @contextlib.contextmanager
    def serving(self):
        """Let all processes of the start method "forkserver" that start in this block be forks of this server."""
        with _swapped:
            before = forkserver.connect_to_new_process
            forkserver.connect_to_new_process = self._server.connect_to_new_process
            try:
                yield
            finally:
                forkserver.connect_to_new_process = before

    def start(self, target, *arguments, daemon=False):
        """Start a process that calls ``target(*arguments)`` with this process's environment.

        A daemon has no children, and ends with this process.
        """
        process = self.context.Process(target=_call, args=(dict(os.environ), target, arguments), daemon=daemon)
        with self.serving():
            process.start()
        return process


def _call(environment, target, arguments):
    gc.freeze()  # each collection would go through all that the server imported, and copy its pages
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)
