"""Servers that ignore conditions or checksums of a cloud's protocol: tierfs detects, reports and compensates."""

import os

import pytest
import servers

import tierfs
from tierfs.objects import as_promised, connect, probe
from tierfs.store import verify
from tierfs.testing import ObjectTierTests

pytestmark = pytest.mark.filterwarnings("default")

LACKS = {
    "moto": ["checksums verified by the server"],
    "ceph": ["conditional updates"],
    "gcs_emulator": ["conditional creates", "conditional updates"],
}


@pytest.fixture(scope="module", params=list(LACKS))
def server(request):
    with servers.running(request.param) as server:
        yield server


@pytest.fixture
def lacks(request):
    return LACKS[request.node.callspec.params["server"]]


class TestObjects(ObjectTierTests):
    @pytest.fixture(autouse=True)
    def versions(self, server):
        self.versions_name_contents = server.protocol == "s3"  # an ETag is a hash

    @pytest.fixture
    def objects(self, server):
        # moto sometimes answers 500 to a read during an overwrite
        backend = connect(server.protocol, server.new_root(), server.options, attempts=3)
        return as_promised(backend, probe(backend).capabilities)


def test_what_the_server_passes_over_is_told_and_made_up_for(server, lacks, caplog):
    root = server.new_root()
    store = tierfs.init(f"{server.protocol}://{root}", options=server.options)
    assert store.descriptor.endpoint.missing == lacks
    assert ", ".join(lacks) in caplog.text
    assert store.descriptor.single_writer == ("conditional updates" in lacks)
    assert ("only one process may write" in caplog.text) == store.descriptor.single_writer
    assert ("read back" in caplog.text) == ("checksums verified by the server" in lacks)
    fs = tierfs.TierFileSystem(target_protocol=server.protocol, target_options=server.options, ack="object")
    content = os.urandom(20_000_000)
    for _ in range(2):
        fs.pipe_file(f"{root}/run/data.bin", content)
    fs.mv(f"{root}/run/data.bin", f"{root}/run/moved.bin")
    assert fs.ls(f"{root}/run", detail=False) == [f"{root}/run/moved.bin"]
    assert verify(store).damage == []
