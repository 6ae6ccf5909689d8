"""A training run whose bucket does not answer for a while."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from outages import begin

import tierfs
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
