"""The operator of a life: one thing after the other, drawn at random, is done or befalls it."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from faults import FAULTS
from operator_actions import ACTIONS

if TYPE_CHECKING:
    from life import Life

__all__ = ["Operator"]

MAX_PAUSES_S = (0.5, 2.0, 5.0)
"""Between two things; one for a round."""


class Operator(threading.Thread):
    """Acts until the round ends."""

    def __init__(self, life: Life, seed: str) -> None:
        super().__init__(name=f"operator-{seed}", daemon=True)
        self._life, self._source = life, random.Random(seed)

    def run(self) -> None:
        life, source, known = self._life, self._source, {**ACTIONS, **FAULTS}
        longest_s = source.choice(MAX_PAUSES_S)
        try:
            while not life.ends.wait(source.uniform(0.0, longest_s)):
                names = [name for name, (_, _, can_be) in known.items() if can_be(life)]
                name = source.choices(names, [known[one][0] for one in names])[0]
                life.record.did(f"{name} ...")
                outcome = known[name][1](life, source)
                life.record.did(f"{name}: {outcome}")
                life.record.count("faults" if name in FAULTS else "actions", name)
        except BaseException as error:  # the round raises it again
            life.fail(error)
