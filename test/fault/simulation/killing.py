"""The ``kill -9`` loop: one directory, many processes, each killed in the middle of its stores."""

from __future__ import annotations

import random
from pathlib import Path

from simulation.child import Child, open_directory, run_keys
from simulation.ledger import Ledger

from sglang_tiered.storage.base import Reason


def kill_loop(directory: Path, *, seed: int, num_kills: int, up_to: int = 40) -> list[int]:
    """Kill a writer after a seeded number of acknowledgements, open what it left, and expect every
    run ever acknowledged; returns their numbers. The store stays below its cap."""
    source = random.Random(seed)
    ledger = Ledger()
    acknowledged: list[int] = []
    first = 0
    for kill in range(num_kills):
        with Child(directory, seed=source.randrange(1 << 30), first=first) as child:
            assert child.line() == "opening"
            assert child.line() == "open"
            child.tell("write")
            lines = [child.line() for _ in range(source.randint(1, up_to))]
            lines += child.kill()
        numbers = [int(line.removeprefix("stored ")) for line in lines]
        acknowledged += numbers
        # Runs beyond those were submitted; stored or not, they are not used again.
        first = max(numbers) + 100
        owed = {key for number in acknowledged for key in run_keys(number)}
        ledger.submitted |= owed
        engine = open_directory(directory)
        try:
            ledger.check(engine, owed)
            # This process leaves something behind as well, and properly closed or not by turns.
            run = run_keys(first - 1)
            assert ledger.store(engine, run) == [Reason.OK] * len(run), f"after kill {kill}"
        finally:
            engine.close()
        acknowledged.append(first - 1)
    return acknowledged
