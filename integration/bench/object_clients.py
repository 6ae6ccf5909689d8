"""The clients that `object.py` compares. Each puts the same chunks under its own keys and gets them, at full speed.

Only tierfs sends a checksum. No client verifies the bytes that it gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from object_servers import REGION, Server

from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES
from tierfs.objects import connect
from tierfs.objects.checksums import checksum_for
from tierfs.objects.protocol import CREATE

WIDTHS = (2, 4, 8, 16)
LOOPS = 2
# s3fs and boto3 would hash plain-text uploads twice, and hash downloads again.
CONFIG = {
    "max_pool_connections": 64,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False},
}


class Client:
    """A client that puts and gets objects.

    Args:
        name: Its name in the report. The first word prefixes its keys.
        put: Puts a chunk under a key.
        get: Reads an object into a buffer of its size, or into memory of the client.
    """

    def __init__(
        self, name: str, put: Callable[[str, bytes], object], get: Callable[[str, memoryview], object]
    ) -> None:
        self.name = name
        self.prefix = name.split(maxsplit=1)[0]
        self._put = put
        self._get = get

    def put_all(self, chunks: Sequence[bytes], width: int) -> None:
        """Put all chunks, ``width`` at a time."""
        self._run(lambda number: self._put(self._key(number), chunks[number]), len(chunks), width)

    def get_all(self, buffers: Sequence[memoryview], width: int) -> None:
        """Get all chunks, ``width`` at a time."""
        self._run(lambda number: self._get(self._key(number), buffers[number]), len(buffers), width)

    def close(self) -> None:
        """Close resources that do not close themselves; the default has none."""

    def _key(self, number: int) -> str:
        return f"{self.prefix}/{number:05d}"

    def _run(self, task: Callable[[int], object], count: int, width: int) -> None:
        with ThreadPoolExecutor(width) as pool:
            list(pool.map(task, range(count)))


class S3fs(Client):
    """s3fs's asynchronous interface on event loops of this class, where it is fastest."""

    def __init__(self, server: Server) -> None:
        super().__init__("s3fs tuned", self._no, self._no)
        self._bucket = server.bucket
        self._loops = [asyncio.new_event_loop() for _ in range(LOOPS)]
        for loop in self._loops:
            threading.Thread(target=loop.run_forever, daemon=True).start()
        self._filesystems = self._everywhere(lambda _: _connected_s3fs(server))

    @staticmethod
    def _no(*_: object) -> None:
        raise AssertionError("it has no threads")

    def put_all(self, chunks: Sequence[bytes], width: int) -> None:
        self._share(lambda fs, number: fs._pipe_file(self._path(number), chunks[number]), len(chunks), width)

    def get_all(self, buffers: Sequence[memoryview], width: int) -> None:
        async def get(fs: Any, number: int) -> None:
            content = await fs._cat_file(self._path(number), start=0, end=len(buffers[number]))
            assert len(content) == len(buffers[number])

        self._share(get, len(buffers), width)

    def close(self) -> None:
        self._everywhere(lambda lane: self._filesystems[lane]._s3creator.__aexit__(None, None, None))

    def _path(self, number: int) -> str:
        return f"{self._bucket}/{self._key(number)}"

    def _share(self, task: Callable[[Any, int], Coroutine[Any, Any, object]], count: int, width: int) -> None:
        numbers = iter(range(count))
        lock = threading.Lock()

        def following() -> int | None:
            with lock:
                return next(numbers, None)

        async def work(fs: Any) -> None:
            while (number := following()) is not None:
                await task(fs, number)

        async def works(lane: int) -> None:
            await asyncio.gather(*(work(self._filesystems[lane]) for _ in range(width // LOOPS)))

        self._everywhere(works)

    def _everywhere(self, task: Callable[[int], Coroutine[Any, Any, Any]]) -> list[Any]:
        futures = [asyncio.run_coroutine_threadsafe(task(lane), loop) for lane, loop in enumerate(self._loops)]
        return [future.result() for future in futures]


async def _connected_s3fs(server: Server) -> Any:
    import s3fs

    fs = s3fs.S3FileSystem(
        **server.options(),
        config_kwargs=CONFIG,
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    await fs.set_session()
    return fs


def boto3(server: Server) -> Client:
    from boto3 import client
    from botocore.config import Config

    s3 = client("s3", endpoint_url=server.url, config=Config(**CONFIG))

    def put(key: str, data: bytes) -> None:
        s3.put_object(Bucket=server.bucket, Key=key, Body=data)

    def get(key: str, out: memoryview) -> None:
        assert len(s3.get_object(Bucket=server.bucket, Key=key)["Body"].read()) == len(out)

    return Client("boto3 and threads", put, get)


def obstore(server: Server) -> Client:
    import obstore as client
    from obstore.store import S3Store

    store = S3Store(
        server.bucket, endpoint=server.url, virtual_hosted_style_request=False, client_options={"allow_http": True}
    )

    def put(key: str, data: bytes) -> None:
        client.put(store, key, data, use_multipart=False)

    def get(key: str, out: memoryview) -> None:
        assert len(client.get(store, key).bytes()) == len(out)

    return Client("obstore and threads", put, get)


def s3torchconnector(server: Server) -> Client:
    """Return the s3torchconnector client. It always uploads in parts; here each object has one."""
    client = torch_client(server, part_bytes=CHUNK_BYTES)

    def put(key: str, data: bytes) -> None:
        with client.put_object(server.bucket, key) as writer:
            writer.write(data)

    def get(key: str, out: memoryview) -> None:
        assert len(client.get_object(server.bucket, key).read()) == len(out)

    return Client("s3torchconnector and threads", put, get)


def torch_client(server: Server, **options: int) -> Any:
    """Return the client below s3torchconnector, for an endpoint that is not Amazon's."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(force_path_style=True, **({"part_size": options["part_bytes"]} if options else {}))
    return S3Client(REGION, endpoint=server.url, s3client_config=config)


def tierfs(server: Server) -> Client:
    """Return the object tier alone. It puts as the flusher does: in blocks, with a checksum, and only new objects."""
    objects = connect("s3", server.bucket, server.options())
    endpoint = server.endpoint()

    def put(key: str, data: bytes) -> None:
        blocks = [memoryview(data)[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
        objects.put(key, blocks, mode=CREATE, checksum=checksum_for(endpoint, blocks))

    def get(key: str, out: memoryview) -> None:
        objects.get(key, [(0, out)])

    return Client("tierfs object tier and threads", put, get)


MAKERS: tuple[Callable[[Server], Client], ...] = (tierfs, S3fs, boto3, obstore, s3torchconnector)


def clients(server: Server, chunk: bytes) -> tuple[list[Client], dict[str, str]]:
    """Return the clients that can put and get a chunk on this server, and the errors of the others by name."""
    able, unable = [], {}
    for make in MAKERS:
        name = make.__name__
        try:
            client = make(server)
            client.put_all([chunk], LOOPS)
            client.get_all([memoryview(bytearray(len(chunk)))], LOOPS)
        except Exception as error:
            unable[name] = f"{type(error).__name__}: {error}"
        else:
            able.append(client)
            server.empty(client.prefix)
    return able, unable


def best_width(send: Callable[[int], None], empty: Callable[[], None]) -> int:
    """Return the number of concurrent transfers that is fastest, by the better of two tries each."""
    seconds: dict[int, float] = {}
    for width in WIDTHS * 2:
        begin = time.perf_counter()
        send(width)
        seconds[width] = min(time.perf_counter() - begin, seconds.get(width, math.inf))
        empty()
    return min(seconds, key=lambda each: seconds[each])


@contextlib.contextmanager
def loopback_sink() -> Iterator[Callable[[Sequence[bytes]], None]]:
    """Yield a function that sends bytes to another process over two TCP connections and returns when they arrived."""
    import socket
    import subprocess
    import sys

    sink = (
        "import socket, threading\n"
        "server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1], flush=True)\n"
        "def take(peer):\n"
        "    buffer = bytearray(1 << 20)\n"
        "    while left := int.from_bytes(peer.recv(8, socket.MSG_WAITALL), 'big'):\n"
        "        while left: left -= peer.recv_into(buffer, min(left, len(buffer)))\n"
        "        peer.sendall(b'x')\n"
        "while True: threading.Thread(target=take, args=(server.accept()[0],)).start()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", sink], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]

        def send(part: int, pieces: Sequence[bytes]) -> None:
            mine = pieces[part::2]
            connections[part].sendall(sum(map(len, mine)).to_bytes(8, "big"))
            for piece in mine:
                connections[part].sendall(piece)
            assert not mine or connections[part].recv(1) == b"x"

        with ThreadPoolExecutor(2) as pool:
            yield lambda pieces: [*pool.map(lambda part: send(part, pieces), range(2))] and None
        for connection in connections:
            connection.close()
    finally:
        process.kill()
        process.communicate()
