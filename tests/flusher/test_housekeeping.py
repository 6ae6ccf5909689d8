"""The background thread of a process that writes."""

import threading

from support.waiting import HANG_S

from tierfs.host.write import ahead
from tierfs.host.write.ahead import start_housekeeping


class Ram:
    """Record the calls, and let the thread end after the second round."""

    def __init__(self):
        self.asked = []
        self.ended = threading.Event()

    def grow_ahead(self):
        self.asked.append("grow_ahead")

    def give_back(self):
        self.asked.append("give_back")
        if len(self.asked) > 2:
            self.ended.set()


def test_slabs_and_room_in_them_are_made_ahead_and_others_get_theirs(monkeypatch):
    monkeypatch.setattr(ahead, "HOUSEKEEPING_S", 0.01)
    ram = Ram()
    assert start_housekeeping(ram, ram, ram.ended)  # the flusher is asked in a later round
    assert ram.ended.wait(HANG_S)
    assert ram.asked == ["grow_ahead", "give_back"] * 2
