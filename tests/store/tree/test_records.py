"""Publish records while answers are lost and other writers change them."""

from dataclasses import replace

import pytest
from support.damaging import make_store, reopened, run
from support.saving import Training

from tierfs.errors import StoreError
from tierfs.format import keys
from tierfs.store import load, save
from tierfs.store.tree.records import nothing_at, observe, publish
from tierfs.testing import Fault, PlannedFault
from tierfs.testing.damage import remove


def test_a_record_that_repair_rewrote_is_read_as_it_stands():
    store, replica = make_store("all"), make_store("off")
    data = Training().file()
    save(replica, "a", data)
    lost = PlannedFault(Fault.LOST_RESPONSE, "put", key_part="tree/a")
    writer = reopened(store, lost, PlannedFault(Fault.REFUSED, "read", key_part="tree/a"))
    save(writer, "other", data)
    record = replace(observe(writer, "other").manifest, write_id=b"w" * 16, previous="")
    with pytest.raises(StoreError):
        publish(writer, nothing_at("a"), record)
    for row in record.rows:
        remove(store.objects, keys.chunk_key(row.name))
    assert "a" in run(reopened(store), replicas=[replica]).rewritten

    found = publish(writer, nothing_at("a"), record)
    assert found.record == observe(reopened(store), "a").record
    assert load(writer, "a") == data
