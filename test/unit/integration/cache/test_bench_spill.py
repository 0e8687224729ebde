"""The stand-ins of ``bench_spill`` keep up with what the spiller asks of the real ones."""

from __future__ import annotations

import pytest

import bench_spill


@pytest.mark.parametrize("state", bench_spill.STATES)
def test_every_state_is_measured_to_its_end(state: str) -> None:
    samples = bench_spill.measure(state, num_dirty=20, num_steps=5, num_offers=2)
    assert [len(taken) for taken in samples.values()] == [5, 5]
