"""SFTP by OpenSSH's server, as this user, with its own keys and directory: a filesystem without a tierfs backend."""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
import tempfile
from collections.abc import Iterator

from servers.server import Server, find_program, free_ports, process, require_package, require_program

_CONF = """
ListenAddress 127.0.0.1:{port}
HostKey {directory}/host
PidFile none
AuthorizedKeysFile {directory}/user.pub
AuthenticationMethods publickey
PermitRootLogin yes
# What holds the keys is a directory below /tmp, where others may write.
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
"""


def require() -> None:
    require_package("paramiko")
    for program in ("sshd", "ssh-keygen"):
        require_program(program, "apt-get install --no-install-recommends openssh-server")


@contextlib.contextmanager
def running() -> Iterator[Server]:
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="sftp-") as directory:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{directory}/{name}"], check=True)
        os.mkdir(f"{directory}/files")
        conf = f"{directory}/sshd_config"
        with open(conf, "w", encoding="utf-8") as file:
            file.write(_CONF.format(port=port, directory=directory))
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd requires it, and only service managers create it

        def options(port: int) -> dict[str, object]:
            key = {"key_filename": f"{directory}/user", "look_for_keys": False, "allow_agent": False}
            return {"host": "127.0.0.1", "port": port, "username": getpass.getuser(), **key}

        program = find_program("sshd")  # sshd re-executes itself, and needs its full path
        assert program is not None
        with process([program, "-D", "-e", "-f", conf], port):
            yield Server("sftp", port, options, base=f"{directory}/files/")
