"""Sweeps over points, such as "operation N fails", of which the gate tries a third.

The other thirds are ``long``. A hash chooses, not ``point % 3``: workloads repeat a few operations,
and every third of those is the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest

ALL = None
in_thirds = pytest.mark.parametrize(
    "third", [0, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 2))]
)


def is_of(third: int | None, point: int) -> bool:
    """Each point is of one third, the same in every run."""
    return third is ALL or zlib.crc32(b"%d" % point) % 3 == third


def sweeps(names: Iterable[str], *, large: Collection[str]) -> Any:
    """A sweep for each name; all points of those that are small."""
    return pytest.mark.parametrize(
        ("name", "third"),
        [
            pytest.param(name, third, marks=[pytest.mark.long] if third else [])
            for name in names
            for third in ((0, 1, 2) if name in large else (ALL,))
        ],
    )
