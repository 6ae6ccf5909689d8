"""A process that forks while its threads ask for the status of a process that it launched."""

import os
import signal
import threading

from tierfs.host.rpc.launch import spawn


def fork_while_asked(log):
    """Check that each of fifty children gets an answer."""
    launched = spawn(["/bin/sh", "-c", "sleep 60"], log)
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            launched.status()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)
                os._exit(int(launched.status() != 0))  # unknown: it is no child of this process
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        os.kill(launched.pid, signal.SIGKILL)
        os.waitpid(launched.pid, 0)
