"""Repair while the object tier fails, loses answers, or is changed by others."""

import pytest
from support.damaging import content, lost_keys, make_store, middle, reopened, run

from tierfs.errors import StoreError
from tierfs.format import keys
from tierfs.store import load, save
from tierfs.testing import Fault, PlannedFault


@pytest.fixture
def store():
    store = make_store()
    save(store, "a", content(0))
    return store


def test_a_record_is_kept_if_its_corrected_bytes_cannot_be_put(store):
    middle(store, keys.record_key("a"))
    with pytest.raises(StoreError):
        run(reopened(store, PlannedFault(Fault.REFUSED, "put", key_part=keys.TREE)))
    assert lost_keys(store) == []
    assert [each.how for each in run(reopened(store)).mended] == ["its own bytes"]
    assert load(reopened(store), "a") == content(0)
