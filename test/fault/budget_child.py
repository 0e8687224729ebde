"""A process with a store that shares a budget, which dies by ``kill -9`` at a step of its choice.

``python -m budget_child FOLDER NAME STEP COUNT`` writes without end and says its capacity after
each tick. It kills itself the COUNT-th time that it comes to STEP; ``never`` is none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from line_process import LineProcess

from kit.runs import NAMESPACE, make_run
from sglang_tiered.integration.storage import machine_budget
from sglang_tiered.integration.storage.machine_budget import MachineBudget
from sglang_tiered.storage import machine_budget as records
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.reclaim import CapacityControl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


PAGE = 4096
REGION = 64 * PAGE
TOTAL = 24 * REGION
FLOOR = 4 * REGION
STEPS = ("locked", "read", "written", "unlocked", "raising", "raised", "shrinking", "trimming")


class BudgetChild(LineProcess):
    """The other end of the process."""

    def __init__(self, folder: Path, name: str, step: str = "never", count: int = 1) -> None:
        super().__init__("budget_child", folder, name, step, count)

    def capacity(self) -> int:
        return int(self.line())


class Dying:
    """Ends the process at a step."""

    def __init__(self, step: str, count: int) -> None:
        self._step, self._left = step, count

    def at(self, step: str) -> None:
        self._left -= step == self._step
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any], before: str, behind: str = "") -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.at(before)
            result = call(*arguments, **named)
            self.at(behind)
            return result

        return wrapped


def plant(dying: Dying) -> None:
    table_of = records.BudgetRecords.table

    @contextlib.contextmanager
    def table(self: records.BudgetRecords) -> Iterator[records.Table]:
        dying.at("locked")
        with table_of(self) as found:
            dying.at("read")
            yield found
        dying.at("unlocked")

    records.BudgetRecords.table = table  # type: ignore[method-assign,assignment]
    records.replace_file = dying.around(records.replace_file, "", "written")  # type: ignore[attr-defined]
    set_of = CapacityControl.set

    def set_capacity(self: CapacityControl, nbytes: int) -> None:
        is_raised = nbytes > self.room().capacity_bytes
        dying.at("raising" if is_raised else "")
        set_of(self, nbytes)
        dying.at("raised" if is_raised else "shrinking")

    CapacityControl.set = set_capacity  # type: ignore[method-assign]
    machine_budget.trim_closed = dying.around(machine_budget.trim_closed, "trimming")  # type: ignore[assignment]


def main(folder: str, name: str, step: str, count: str) -> None:
    plant(Dying(step, int(count)))
    number = 0

    def clock() -> float:
        """How long pages were not used is counted in orders, however fast they come."""
        return number * machine_budget.TICK_S

    budget = MachineBudget(
        Path(folder) / "budget",
        Path(folder) / name,
        total_bytes=TOTAL,
        floor_bytes=FLOOR,
        region_bytes=REGION,
    )
    engine = RegionEngine(
        Path(folder) / name,
        namespace=NAMESPACE,
        capacity_bytes=budget.capacity_bytes,
        most_bytes=TOTAL,
        region_bytes=REGION,
        num_threads=2,
        clock=clock,
    )
    budget._store = engine.capacity  # noqa: SLF001 - its ticks are the test's
    os.write(1, b"%d\n" % engine.stats().capacity_bytes)
    for number, order in enumerate(sys.stdin, 1):
        if order.strip() == "exit":
            break
        if order.strip() == "write":
            for part in range(3):
                run = make_run(1000 * ord(name) + 3 * number + part, [PAGE] * 60)
                engine.submit_store(run).wait(30)
        budget.tick()
        os.write(1, b"%d\n" % engine.stats().capacity_bytes)
    budget.close()
    engine.close()
    budget.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
