"""The credentials that the flusher uses, and how renewed ones reach it."""

import os
import threading
from dataclasses import replace

import pytest
from support.tiered import save_at
from support.waiting import until

import tierfs
from tierfs import __version__
from tierfs.errors import ReadOnlyError, StoreError
from tierfs.flusher.engine import build_engine
from tierfs.flusher.publish import StorePublisher
from tierfs.flusher.server import Service
from tierfs.host.pending.levels import Level
from tierfs.objects import LocalObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.session import open as opening
from tierfs.session.tiers import Launcher
from tierfs.store import load, status, wait
from tierfs.store.create import read_descriptor
from tierfs.store.store import Store

DATA = os.urandom(300_000)


class Cloud:
    """An object tier that refuses some keys, and flushers on threads that get a key by option or by environment."""

    def __init__(self, tmp_path):
        self.url = f"file://{tmp_path}/store"
        self.path = tmp_path
        self.environment = "none"
        self.nvme = "64MiB"
        self.asked, self.expired, self.readers = set(), set(), set()
        self.started = []
        tierfs.init(self.url)

    def client(self, **options):
        """Open the store as a process with these options."""
        tiers = TierOptions(ram="64MiB", nvme=self.nvme, state_dir=str(self.path / "state"), ack="local")
        return open_store(replace(parse_url(self.url), options=options, tiers=tiers))[0]

    def launch(self, launcher):
        environment = self.environment

        def connect(way):
            objects = Guarded(LocalObjects(self.path / "store"), self, way.options.get("key", environment))
            return StorePublisher(lambda: Store(objects, read_descriptor(objects, self.url), url=self.url))

        budgets = {name: getattr(launcher._settings, name) for name in ("ram_bytes", "nvme_bytes", "bandwidth")}
        engine = build_engine(launcher._host, launcher._target.uuid, connect, **budgets)
        service = Service(engine, launcher._directory, version=__version__, linger_s=60)
        thread = threading.Thread(target=service.run)
        thread.start()
        self.started.append((service, thread, engine))

    def end(self, client):
        """End the client's process. The next client counts as another process."""
        client.tiers.close()
        until(lambda: not self.started[-1][0]._connections)
        begin_another_process()

    def stop(self):
        for service, thread, _ in self.started:
            service.stop()
            thread.join()


class Guarded(WrappedObjects):
    def __init__(self, inner, cloud, key):
        super().__init__(inner)
        self.cloud, self.key = cloud, key

    def _around(self, request, send):
        self.cloud.asked.add(self.key)
        if self.key in {*self.cloud.expired, "none"}:
            raise StoreError(f"the credentials {self.key} have expired", refused=True)
        if self.key in self.cloud.readers and request.method in {"put", "delete"}:
            raise ReadOnlyError(f"{self.key} may only read", refused=True)
        return send()


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    cloud = Cloud(tmp_path)
    monkeypatch.setattr(Launcher, "launch", lambda self: cloud.launch(self))
    opened = []
    make = cloud.client
    monkeypatch.setattr(cloud, "client", lambda **options: opened.append(make(**options)) or opened[-1])
    yield cloud
    for store in opened:
        store.tiers.close()
    cloud.stop()
    begin_another_process()


def begin_another_process():
    opening._renew()


def test_the_flusher_opens_the_store_before_anything_is_staged(cloud):
    writer = cloud.client(key="writing")
    writer.hand_over(writes=True)
    writer.tiers.writer.announce()
    until(lambda: "writing" in cloud.asked)


def test_credentials_renewed_as_options_reach_the_flusher(cloud):
    first = cloud.client(key="old")
    save_at(first, "a", DATA, Level.LOCAL)
    wait(first, "", Level.OBJECT)
    cloud.expired.add("old")
    save_at(first, "b", DATA, Level.LOCAL)
    with pytest.raises(StoreError, match="old have expired"):
        wait(first, "", Level.OBJECT)
    second = cloud.client(key="new")
    assert second.tiers is first.tiers
    wait(second, "", Level.OBJECT)
    save_at(second, "c", DATA, Level.LOCAL)
    wait(first, "", Level.OBJECT)
    assert len(cloud.started) == 1


def test_options_of_a_process_reach_the_next_flusher_all(cloud):
    cloud.readers.add("reading")
    writer = cloud.client(key="writing")
    save_at(writer, "a", DATA, Level.LOCAL)
    wait(writer, "", Level.OBJECT)
    cloud.client(key="reading")
    cloud.stop()
    save_at(writer, "b", DATA, Level.LOCAL)
    wait(writer, "", Level.OBJECT)
    assert len(cloud.started) == 2


def test_renewed_environment_credentials_reach_the_next_flusher(cloud):
    cloud.environment = "old"
    trainer = cloud.client()
    save_at(trainer, "a", DATA, Level.LOCAL)
    wait(trainer, "", Level.OBJECT)
    cloud.expired.add("old")
    save_at(trainer, "b", DATA, Level.LOCAL)
    with pytest.raises(StoreError, match="old have expired"):
        wait(trainer, "", Level.OBJECT)
    cloud.end(trainer)
    cloud.environment = "new"
    shell = cloud.client()
    status(shell)
    assert len(cloud.started) == 1
    cloud.stop()
    wait(shell, "", Level.OBJECT)
    assert len(cloud.started) == 2
    assert load(open_store(parse_url(cloud.url))[0], "b") == DATA


def test_a_process_without_credentials_ends_no_flusher(cloud):
    cloud.environment = "old"
    trainer = cloud.client()
    save_at(trainer, "a", DATA, Level.LOCAL)
    wait(trainer, "", Level.OBJECT)
    cloud.expired.add("old")
    save_at(trainer, "b", DATA, Level.LOCAL)
    with pytest.raises(StoreError, match="old have expired") as refusal:
        wait(trainer, "", Level.OBJECT)
    assert refusal.value.refused
    begin_another_process()
    cloud.environment = "none"
    status(cloud.client())
    cloud.expired.clear()
    until(cloud.started[0][2].is_idle)
    wait(trainer, "", Level.OBJECT)
    assert len(cloud.started) == 1
