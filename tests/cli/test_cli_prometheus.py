"""``status --prometheus``, parsed by the rules of Prometheus's text format 0.0.4."""

import re

import pytest

from tierfs.cli.commands._status_prometheus import exposition

LABEL = r'(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)="(?P<value>(?:[^"\\\n]|\\\\|\\"|\\n)*)"'
REPORT = {
    "store": "s3://bucket/run",
    "uuid": "1ef826db",
    "ack": "local",
    "tiers": {
        "object": {
            "url": "s3://bucket/run", "gives": "object", "host_local": False, "survives": "loss of this host",
            "reads_back": False, "fallbacks": {"flusher_throttled": 5},
            "requests": {"process_delete_version": {"requests": 8, "errors": 1, "bytes": 99, "seconds": 0.5}},
        },
        "ram": {
            "budget_bytes": 64, "host_bytes": 48, "store_bytes": 40, "used_bytes": 9, "dirty_bytes": 6, "clean_bytes": 3,
            "segments": 2, "waits": 4, "waited_s": 1.5, "evicted_bytes": 7, "gives": "staged",
        },
        "nvme": {
            "budget_bytes": 128, "used_bytes": 10, "dirty_bytes": 1, "clean_bytes": 9, "chunks": 5, "drafts": 1,
            "conflicts": 0, "damaged": 0, "evicted_bytes": 0, "gives_local": True, "fallbacks": {"buffered_io": 2},
            "gives": "local",
        },
    },
    "flusher": {"running": True, "pid": 7},
    "queue_files": 3,
    "queue_bytes": 1 << 60,
    "oldest_age_s": 0.25,
    "conflicts": [{"path": "run/a", "message": "changed"}],
    "errors": [],
    "rate_bytes_per_s": 1000.5,
    "unreadable_drafts": 0,
    "unread_segments": 0,
    "counters": {"flusher_uploaded_bytes": 12, "process_waits_for_room": 2},
}  # fmt: skip


def unescape(text):
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text)


def parse(text):
    """Return families by name: (type, help, {labels: value}). Fails where the text breaks a rule of the format."""
    assert text.endswith("\n")
    families, seen = {}, set()
    name = None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, words = line[len("# HELP ") :].partition(" ")
            assert name not in families, "a family is in one piece"
            assert re.fullmatch(r"(?:[^\\]|\\\\|\\n)*", words)
            families[name] = [None, unescape(words), {}]
        elif line.startswith("# TYPE "):
            typed, kind = line[len("# TYPE ") :].split(" ")
            assert typed == name
            assert families[name][0] is None
            assert kind in ("counter", "gauge")
            families[name][0] = kind
        else:
            match = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} (\S+)", line)
            assert match is not None, line
            assert match[1] == name
            assert families[name][0] is not None
            labels = {found["name"]: unescape(found["value"]) for found in re.finditer(LABEL, match[2])}
            assert re.fullmatch(f"{plain(LABEL)}(?:,{plain(LABEL)})*", match[2]), match[2]
            key = frozenset(labels.items())
            assert (name, key) not in seen
            seen.add((name, key))
            families[name][2][key] = float(match[3])
    return families


def plain(pattern):
    return re.sub(r"\?P<\w+>", "?:", pattern)


def value(families, name, **labels):
    return families[name][2][frozenset({"store": "s3://bucket/run", **labels}.items())]


def test_metrics_have_base_units_in_their_names():
    families = parse(exposition(REPORT))
    assert value(families, "tierfs_queue_files") == 3
    assert value(families, "tierfs_queue_bytes") == 1 << 60
    assert value(families, "tierfs_queue_oldest_age_seconds") == 0.25
    assert value(families, "tierfs_upload_bytes_per_second") == 1000.5
    assert value(families, "tierfs_conflict_files") == 1
    assert value(families, "tierfs_failing_files") == 0
    assert value(families, "tierfs_flusher_running") == 1
    assert value(families, "tierfs_tier_info", tier="nvme", gives="local") == 1
    assert value(families, "tierfs_tier_dirty_bytes", tier="ram") == 6
    assert value(families, "tierfs_tier_dirty_bytes", tier="nvme") == 1
    assert value(families, "tierfs_tier_waited_seconds_total", tier="ram") == 1.5
    assert value(families, "tierfs_tier_fallbacks_total", tier="nvme", fallback="buffered_io") == 2
    assert value(families, "tierfs_tier_fallbacks_total", tier="object", fallback="flusher_throttled") == 5
    asked = {"tier": "object", "by": "process", "method": "delete_version"}
    assert value(families, "tierfs_tier_requests_total", **asked) == 8
    assert value(families, "tierfs_tier_request_errors_total", **asked) == 1
    assert value(families, "tierfs_tier_request_bytes_total", **asked) == 99
    assert value(families, "tierfs_tier_request_seconds_total", **asked) == 0.5
    assert value(families, "tierfs_flusher_uploaded_bytes_total") == 12
    assert value(families, "tierfs_process_waits_for_room_total") == 2


def test_counters_alone_are_named_total():
    for name, (kind, text, samples) in parse(exposition(REPORT)).items():
        assert name.startswith("tierfs_")
        assert name.endswith("_total") == (kind == "counter"), name
        assert text.endswith(".")
        assert samples
        assert not re.search(r"_(s|ms|kb|mb|kib|mib)(_total)?$", name)


def test_unknown_metrics_are_left_out():
    bare = {key: REPORT[key] for key in ("store", "uuid", "ack", "queue_files", "queue_bytes", "oldest_age_s")}
    bare |= {"tiers": {"object": REPORT["tiers"]["object"]}, "flusher": {"running": False}}
    bare |= {"conflicts": [], "errors": [], "counters": {}}
    families = parse(exposition(bare))
    assert value(families, "tierfs_flusher_running") == 0
    assert "tierfs_upload_bytes_per_second" not in families
    assert "tierfs_tier_budget_bytes" not in families
    silent = parse(exposition(bare | {"flusher": {"running": True, "silent": "no answer"}}))
    assert value(silent, "tierfs_flusher_running") == 1


@pytest.mark.parametrize("url", ['s3://b/a"b', "s3://b/a\nb", r"s3://b/\n", "s3://b/}{,=#"])
def test_a_label_comes_back_as_it_was(url):
    families = parse(exposition(REPORT | {"store": url}))
    assert families["tierfs_queue_files"][2] == {frozenset({("store", url)}): 3.0}


def test_conflicts_and_errors_that_a_flusher_counts_but_does_not_list_are_counted():
    families = parse(exposition(REPORT | {"conflict_files": 500, "failing_files": 7}))
    assert value(families, "tierfs_conflict_files") == 500
    assert value(families, "tierfs_failing_files") == 7


def test_a_name_that_is_no_valid_unicode_does_not_break_the_text():
    text = exposition(REPORT | {"store": "file:///bad\udcff"})
    assert parse(text)
    assert text.encode()


def test_a_counter_of_any_name_gets_a_valid_one():
    families = parse(exposition(REPORT | {"counters": {"flusher_odd-näme.1": 1, "flusher_slept_s": 2.5}}))
    assert value(families, "tierfs_flusher_odd_n_me_1_total") == 1
    assert value(families, "tierfs_flusher_slept_seconds_total") == 2.5
