"""Tile registers are used where the process may, and only there."""

import platform

import pytest

from pdserve.kernels import library
from pdserve.kernels.library import NO_TILES, _flags
from pdserve.kernels.tiles import take_tiles


def test_a_process_without_permission_has_a_library_of_its_own(monkeypatch):
    digests = []
    for may_use in (True, False):
        monkeypatch.setattr(library, "take_tiles", lambda may_use=may_use: may_use)
        assert (NO_TILES in _flags()) == (not may_use)
        digests.append(library._digest())
    assert digests[0] != digests[1]


def test_a_cpu_without_tiles_gives_none():
    if "amx_tile" in library._cpu_features():
        pytest.skip("this CPU has them")
    assert not take_tiles()


def test_other_systems_are_not_asked(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert not take_tiles.__wrapped__()
