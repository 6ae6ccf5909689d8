"""A real S3 server behind the generic backend: single-writer, and said so; everything else as everywhere."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid

import pytest

from tierfs.testing import ObjectTierTests

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -r integration/requirements.txt")
if shutil.which("ministack", path=os.path.dirname(sys.executable)) is None:
    pytest.skip("ministack is not installed: pip install -r integration/requirements.txt", allow_module_level=True)

import fsspec

import tierfs
from tierfs.objects import FsspecObjects

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "PERSIST_STATE": "0"}
    program = os.path.join(os.path.dirname(sys.executable), "ministack")
    server = subprocess.Popen([program], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None, "the server ended at once"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def options(endpoint):
    return {"key": "any", "secret": "any", "endpoint_url": endpoint}


@pytest.fixture
def bucket(options):
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", **options).mkdir(name)
    return name


class TestS3Objects(ObjectTierTests):
    versions_name_contents = True  # an ETag is a hash

    @pytest.fixture
    def objects(self, options, bucket):
        return FsspecObjects(fsspec.filesystem("s3", use_listings_cache=False, **options), f"{bucket}/root")


def test_a_store_on_s3_saves_lists_verifies_and_says_that_it_is_single_writer(options, bucket, caplog):
    store = tierfs.init(f"s3://{bucket}/run", options=options)
    assert store.descriptor.single_writer
    assert "only one process may write" in caplog.text
    fs = tierfs.TierFileSystem(target_protocol="s3", target_options=options)
    content = os.urandom(20_000_000)
    fs.pipe_file(f"{bucket}/run/step/data.bin", content)
    fs.pipe_file(f"{bucket}/run/step/.metadata", b"metadata")
    assert fs.cat_file(f"{bucket}/run/step/data.bin") == content
    assert fs.cat_file(f"{bucket}/run/step/data.bin", 16_000_000, 17_000_000) == content[16_000_000:17_000_000]
    fs.mv(f"{bucket}/run/step/data.bin", f"{bucket}/run/step/moved.bin")
    assert fs.ls(f"{bucket}/run/step", detail=False) == [f"{bucket}/run/step/.metadata", f"{bucket}/run/step/moved.bin"]
    fs.wait(f"{bucket}/run", "object", 60)
    from tierfs.store import verify

    assert verify(store).damage == []
