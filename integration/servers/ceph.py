"""S3 by Ceph's gateway, with a monitor and one OSD that keeps all in memory: the one real object store here.

It checks signatures, and the body hashes in them. This version, Debian 12's, does not know the ``x-amz-checksum-*``
headers, like many S3 servers on premises.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator

from servers.server import Server, free_ports, process, require_package, require_program, s3

_KEY, _SECRET = "test-key", "test-secret"

_CONF = """
[global]
fsid = {cluster}
mon host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_v1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
# Without keys; the secure mode needs some, and the gateway would ask for it for ever.
auth cluster required = none
auth service required = none
auth client required = none
keyring = /dev/null
ms mon client mode = crc secure
ms mon service mode = crc secure
ms mon cluster mode = crc secure
ms client mode = crc secure
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 939524096
run dir = {directory}
admin socket = {directory}/$name.asok
pid file = {directory}/$name.pid
log file = {directory}/$name.log
mon data = {directory}/mon
osd data = {directory}/osd
rgw data = {directory}/rgw
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dynamic resharding = false
rgw override bucket index max shards = 1
"""


def require() -> None:
    require_package("s3fs")
    for program in ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin"):
        require_program(program, "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common")


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """Run the server. It takes a quarter of a minute to start."""
    with tempfile.TemporaryDirectory(prefix="ceph-") as directory, contextlib.ExitStack() as processes:
        mon, mon_v1, osd, port = free_ports(4)
        cluster = str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            os.mkdir(f"{directory}/{name}")
        conf = f"{directory}/ceph.conf"
        with open(conf, "w", encoding="utf-8") as file:
            file.write(_CONF.format(cluster=cluster, mon=mon, mon_v1=mon_v1, port=port, directory=directory))

        monmap = f"{directory}/monmap"
        addresses = f"[v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_v1}]"
        _run("monmaptool", "--create", "--fsid", cluster, "--addv", "a", addresses, monmap)
        _run("ceph-mon", "-c", conf, "--mkfs", "-i", "a", "--monmap", monmap)
        processes.enter_context(process(["ceph-mon", "-c", conf, "-i", "a", "-f"], mon))

        disk = str(uuid.uuid4())
        _run("ceph", "-c", conf, "osd", "new", disk)
        _run("ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", disk)
        _run("ceph", "-c", conf, "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here")
        limits = [f"--ms_bind_port_min={osd}", f"--ms_bind_port_max={osd + 100}"]
        processes.enter_context(process(["ceph-osd", "-c", conf, "-i", "0", "-f", *limits], osd))
        processes.enter_context(process(["radosgw", "-c", conf, "-n", "client.rgw", "-f"], port))
        user = ["--uid=test", "--display-name=test", f"--access-key={_KEY}", f"--secret-key={_SECRET}"]
        _run("radosgw-admin", "-c", conf, "-n", "client.rgw", "user", "create", *user)
        yield s3(port, _KEY, _SECRET)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-2000:]}")
