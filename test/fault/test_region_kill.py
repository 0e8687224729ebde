"""``kill -9`` on a real process that stores into a real directory, over and over on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulation.child import Child, open_directory, run_keys
from simulation.killing import kill_loop


@pytest.mark.parametrize(("num_kills", "up_to"), [(10, 40), (2, 1), (2, 2)])
def test_no_kill_loses_an_acknowledged_page(tmp_path: Path, num_kills: int, up_to: int) -> None:
    """In the first region too."""
    acknowledged = kill_loop(tmp_path / "store", seed=up_to, num_kills=num_kills, up_to=up_to)
    assert len(acknowledged) > 100 or up_to < 40


def test_a_kill_while_the_store_opens(tmp_path: Path) -> None:
    """At moments the scheduler picks; the power loss test has every one of them."""
    acknowledged = kill_loop(tmp_path / "store", seed=1, num_kills=1)
    for _ in range(3):
        with Child(tmp_path / "store") as child:
            assert child.line() == "opening"
            child.strike()
    engine = open_directory(tmp_path / "store")
    for number in acknowledged:
        assert engine.lookup(run_keys(number)).num_hits == len(run_keys(number))
    engine.close()
