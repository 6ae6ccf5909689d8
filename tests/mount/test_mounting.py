"""Mounting from a process that has many descriptors, as a training process has."""

import fcntl
import os
import resource

from tierfs.mount.mounting import _is_ready


def test_a_descriptor_above_1023_is_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 1500)  # one that is free
    try:
        assert not _is_ready(high, 0.01)
        os.write(write, b"x")
        assert _is_ready(high, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in (read, write, high):
            os.close(descriptor)
