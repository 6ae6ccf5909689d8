"""The public names. Add a new name here too. Removing or renaming one needs a decision record (DESIGN 8)."""

import importlib
import inspect

import pytest

import tierfs

PUBLIC = {
    "tierfs": ["TierFileSystem", "TierfsError", "__version__", "init", "mount"],
    "tierfs.dcp": ["TierLoadPlanner", "TierReader", "TierSavePlanner", "TierWriter", "install", "uninstall"],
    "tierfs.device": ["DeviceTier", "Drain", "Gate"],
    "tierfs.experimental.activations": ["Activations"],
    "tierfs.fs": ["TierFileSystem"],
    "tierfs.testing": [
        "Fault",
        "FaultyObjects",
        "ObjectTierTests",
        "PlannedFault",
        "PlannedTcpFault",
        "TcpFault",
        "TcpFaultProxy",
        "flip_bit",
        "remove",
        "swap",
        "truncate",
    ],
    "tierfs.train": [
        "Best",
        "Context",
        "Deadline",
        "Every",
        "Geometric",
        "KeepPolicy",
        "Latest",
        "Manager",
        "Preemption",
        "Replay",
        "Restored",
        "ResumeReport",
        "SaveHandle",
        "SavePolicy",
        "TrainState",
        "Within",
        "YoungDaly",
        "outlive_signals",
    ],
}
PACKAGES = [*PUBLIC, "tierfs.cli", "tierfs.codec", "tierfs.objects", "tierfs.session", "tierfs.store"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_package_exports_what_it_promised(name):
    assert sorted(importlib.import_module(name).__all__) == PUBLIC[name]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_exists(name):
    package = importlib.import_module(name)
    assert len(set(package.__all__)) == len(package.__all__)
    for exported in package.__all__:
        getattr(package, exported)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(name).no_such_name


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_documented(name):
    package = importlib.import_module(name)
    found = {exported: getattr(package, exported) for exported in package.__all__}
    for exported, item in list(found.items()):
        if inspect.isclass(item):
            found |= {
                f"{exported}.{member}": getattr(item, member)
                for member in vars(item)
                if member[0] != "_" and not member.startswith("test_")
            }
    undocumented = [
        f"{name}.{path}"
        for path, item in found.items()
        if (inspect.isroutine(item) or isinstance(item, property) or inspect.isclass(item)) and not inspect.getdoc(item)
    ]
    assert not undocumented


def test_every_error_has_a_kind_of_its_own():
    errors = [found for found in vars(tierfs.errors).values() if inspect.isclass(found)]
    named = [error for error in errors if issubclass(error, tierfs.TierfsError) and "kind" in vars(error)]
    assert len({error.kind for error in named}) == len(named)
