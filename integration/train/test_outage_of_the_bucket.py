"""A training run whose bucket does not answer for a while."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from outages import begin

import tierfs
from tierfs.testing import PlannedTcpFault, TcpFault
from tierfs.train import Every, Latest, Manager


def test_saves_go_on_while_the_bucket_does_not_answer(s3_of_environment, caplog):
    server, proxy = s3_of_environment
    url = f"tierfs::s3://{server.new_root()}"
    tierfs.init(url)
    with Manager(url, save=[Every(steps=1)], keep=[Latest(1)], ram="64MiB", nvme="64MiB") as manager:

        def save(step):
            handle = manager.step(step, {"weight": torch.full((1000,), float(step))})
            handle.wait("local")
            manager.wait()
            return handle

        save(1).wait("object")
        begin(proxy, "hang")
        handles = [save(step) for step in (2, 3, 4)]
        for work in ("cannot check for an earlier save", "the work after a save failed"):
            said = [text for text in caplog.messages if work in text]
            assert ["did not answer" in text for text in said] == [True, True, True], said
        proxy.recover()
        for handle in handles:
            handle.wait("object", 120)
        assert manager.errors == []


def test_saves_go_on_if_the_bucket_stops_answering_within_a_removal(s3_of_environment, caplog):
    server, proxy = s3_of_environment
    url = f"tierfs::s3://{server.new_root()}"
    tierfs.init(url)
    is_silent = threading.Event()

    def is_struck(method, path):
        if method == "PUT" and "/.tierfs/tree/step_1/.metadata" in path:
            is_silent.set()  # the tombstone of the first checkpoint
        return is_silent.is_set()

    with Manager(url, save=[Every(steps=1)], keep=[Latest(1)], ram="64MiB", nvme="64MiB") as manager:

        def save(step):
            handle = manager.step(step, {"weight": torch.full((1000,), float(step))})
            handle.wait("local")
            return handle

        for step in (1, 2):
            save(step).wait("object")
        manager.wait()
        proxy.fail(PlannedTcpFault(TcpFault.BLACK_HOLE, side="request", at=0, aim=is_struck))
        handles = [save(3)]
        assert is_silent.wait(60)
        handles += [save(4), save(5)]
        assert not [text for text in caplog.messages if "attempt 3 of 5" in text], "they waited for the removal"
        proxy.recover()
        for handle in handles:
            handle.wait("object", 120)
        manager.wait()  # for the removal, too
        assert manager.errors == []
        assert [each.step for each in manager.checkpoints if each.is_complete] == [2, 3, 4, 5]
