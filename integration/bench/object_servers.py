"""The servers of `object.py`: ministack, which speaks S3, and nginx, which is fast.

nginx stores and serves objects as files on tmpfs, and knows nothing else of S3. It checks no signature, condition or
checksum, its listings are empty, and its ETags are all the same. Only the test of conditions before the first put is
answered as by S3. A figure against it is the cost of the client.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec

from tierfs.format.descriptor import Capabilities
from tierfs.objects import as_promised, connect, probe
from tierfs.store.create import create_store
from tierfs.testing import TcpFaultProxy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import s3server
from servers.server import free_ports, process

BUCKET = "bucket"
REGION = "us-east-1"
# The capabilities of S3 itself.
_PROMISES = Capabilities(
    conditional_create=True,
    conditional_update=True,
    list_after_write=True,
    atomic_put=True,
    checksums=("crc64nvme", "sha256", "md5"),
)
# A server allocates memory for each object and frees it on deletion. If the host of a virtual machine took the free
# memory back, the kernel may need as long to get it as the server needs for the rest, with any client. So the server
# keeps its memory.
_KEEPS_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_CONFIGURATION = r"""
worker_processes auto; daemon off; pid {base}/pid; error_log {base}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; default_type application/octet-stream;
  client_max_body_size 0; client_body_buffer_size 1m; client_body_temp_path {base}/bodies;
  proxy_temp_path {base}/1; fastcgi_temp_path {base}/2; uwsgi_temp_path {base}/3; scgi_temp_path {base}/4;
  server {{
    listen 127.0.0.1:{port}; root {base}/root; etag off; add_header ETag '"1"';
    error_page 404 @missing;
    location / {{
      dav_methods PUT DELETE; create_full_put_path on;
      if ($args ~ list-type=) {{ return 200 '{xml}<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'; }}
      if ($args ~ ^delete) {{ return 200 '{xml}<DeleteResult></DeleteResult>'; }}
    }}
    location ~ /\.tierfs/probe/conditions- {{ return 412 '{xml}<Error><Code>PreconditionFailed</Code></Error>'; }}
    location @missing {{ return 404 '{xml}<Error><Code>NoSuchKey</Code></Error>'; }}
  }}
}}
"""


class Server:
    """A server for objects.

    Attributes:
        name: Its name in the report.
        url: URL of the endpoint.
        bucket: An existing bucket that nothing else uses.
        is_s3: Whether it speaks S3, not only PUT and GET.
    """

    def __init__(self, name: str, url: str, bucket: str, directory: Path | None = None) -> None:
        self.name = name
        self.url = url
        self.bucket = bucket
        self.is_s3 = directory is None
        self._directory = directory
        self._endpoint: Capabilities | None = None

    @contextlib.contextmanager
    def proxied(self) -> Iterator[tuple[Server, TcpFaultProxy]]:
        """Yield the same server behind a proxy that counts requests, and the proxy."""
        with TcpFaultProxy("127.0.0.1", int(self.url.rpartition(":")[2])) as proxy:
            yield Server(self.name, f"http://127.0.0.1:{proxy.port}", self.bucket), proxy

    def options(self) -> dict[str, object]:
        """Return the options for s3fs and tierfs."""
        return {
            "key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
            "endpoint_url": self.url,
        }

    def endpoint(self) -> Capabilities:
        """Return the capabilities that tierfs assumes of it."""
        if self._endpoint is None:
            if self.is_s3:
                self._endpoint = probe(connect("s3", f"{self.bucket}/probe", self.options(), attempts=1)).capabilities
            else:
                self._endpoint = _PROMISES
        return self._endpoint

    def make_store(self, name: str) -> str:
        root = f"{self.bucket}/{name}"
        objects = as_promised(connect("s3", root, self.options()), self.endpoint())
        create_store(objects, f"s3://{root}", random_bytes=os.urandom(16))
        return f"tierfs::s3://{root}"

    def stored(self, prefix: str) -> int:
        if self._directory is not None:
            paths = (self._directory / self.bucket / prefix).rglob("*")
            return sum(path.stat().st_size for path in paths if path.is_file())
        return sum(item.size for item in connect("s3", f"{self.bucket}/{prefix}", self.options()).list(""))

    def empty(self, prefix: str) -> None:
        """Delete the objects below a prefix, because these servers keep everything in memory."""
        if self._directory is not None:
            shutil.rmtree(self._directory / self.bucket / prefix, ignore_errors=True)
        else:
            objects = connect("s3", f"{self.bucket}/{prefix}", self.options())
            objects.delete([item.key for item in objects.list("")])


@contextlib.contextmanager
def nginx() -> Iterator[Server]:
    """Run nginx with its files on tmpfs.

    Raises:
        FileNotFoundError: nginx is not installed.
    """
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/bin")
    if program is None:
        raise FileNotFoundError(
            "nginx is not installed: apt-get install nginx-light, or leave its rows out with --server"
        )
    base = Path(tempfile.mkdtemp(prefix="tierfs-nginx-", dir="/dev/shm"))
    try:
        base.chmod(0o755)
        for name in ("bodies", "root", f"root/{BUCKET}"):
            (base / name).mkdir()
            (base / name).chmod(0o777)  # its workers may run as another user
        (port,) = free_ports(1)
        (base / "nginx.conf").write_text(_CONFIGURATION.format(base=base, port=port, xml=_XML.replace('"', '\\"')))
        with process([program, "-c", str(base / "nginx.conf"), "-e", str(base / "error.log")], port):
            yield Server("nginx", f"http://127.0.0.1:{port}", BUCKET, base / "root")
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def ministack() -> Iterator[Server]:
    """Run the tests' server, with settings that make it keep its memory."""
    with s3server.running(_KEEPS_MEMORY) as port:
        yield Server("ministack", f"http://127.0.0.1:{port}", s3server.new_bucket(port))


@contextlib.contextmanager
def running(url: str) -> Iterator[Server]:
    """Use a running server with the credentials in the environment, and a new bucket that is deleted at the end."""
    server = Server(url, url, f"tierfs-bench-{uuid.uuid4().hex[:12]}")
    fs = fsspec.filesystem("s3", **server.options())
    fs.mkdir(server.bucket)
    try:
        yield server
    finally:
        fs.rm(server.bucket, recursive=True)
