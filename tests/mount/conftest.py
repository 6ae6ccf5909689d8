import pytest
from support.mount_hand import Hand

from tierfs.host.pending.levels import Level
from tierfs.session import TierOptions, init, open_store
from tierfs.session.url import Location


@pytest.fixture(params=["direct", "tiers"])
def store(request, tmp_path):
    """A store in memory: its flusher is a thread, which starts sooner than a process."""
    init(f"memory://{tmp_path}/store")
    tiers = TierOptions(ram="192MiB", nvme="0", state_dir=str(tmp_path / "state"), ack="staged")
    if request.param == "direct":
        tiers = TierOptions(ram="0", nvme="0", state_dir=str(tmp_path / "state"))
    return open_store(Location("memory", f"{tmp_path}/store", tiers=tiers))[0]


@pytest.fixture
def other(tmp_path):
    """The same store, opened on another host."""
    location = Location(
        "memory", f"{tmp_path}/store", tiers=TierOptions(ram="0", nvme="0", state_dir=str(tmp_path / "other"))
    )
    store = open_store(location)[0]
    store.ack = Level.OBJECT
    return store


@pytest.fixture
def hand(store, tmp_path):
    staging = tmp_path / "staging"
    staging.mkdir()
    return Hand(store, staging)
