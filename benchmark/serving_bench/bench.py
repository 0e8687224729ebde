"""What every scenario is given, and the gate its figures pass: equal answers first."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from serving_bench.client import Request, Sample, ask_each
from serving_bench.conversations import random_tokens
from serving_bench.measures import Outcome, Round, describe_samples, unequal_labels
from serving_bench.systems import Fleet, start_fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from serving_bench.setting import Geometry, Setting
    from serving_bench.systems import System
    from storage_bench.figures import Report
    from storage_bench.workspace import Workspace


@dataclass
class Bench:
    setting: Setting
    workspace: Workspace
    report: Report
    model: Path
    kv_bytes_per_token: int
    names: Sequence[str]  # systems chosen, in order
    trace: Path | None = None
    sharegpt: Path | None = None  # a file of conversations, in place of those made up
    allow_dropped: bool = False  # rows of either, however many
    extra: Sequence[str] = ()  # flags for every server
    neighbour: int = 0  # cores that another process keeps busy where a scenario has such a part
    occupancy: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    exit_code: int = 0
    failures: list[str] = field(default_factory=list)  # why the exit code will not be 0
    _num_fresh: int = 0
    _main: Fleet | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _start_s: float = field(default_factory=time.perf_counter)

    # ---- Servers ----

    def main_fleet(self) -> Fleet:
        """The servers most scenarios share, started by the first that needs them and warm: each
        was asked more than its host tier holds, so that all of its memory has been touched."""
        if self._main is None:
            self._main = self._stack.enter_context(self.fleet(self.names, self.setting.main))
            self.warm_up(self._main)
        return self._main

    def close_main_fleet(self) -> None:
        """Stop them and remove what they stored."""
        self._stack.close()
        self._main = None

    @contextlib.contextmanager
    def fleet(
        self,
        names: Sequence[str],
        geometry: Geometry,
        environment: Callable[[str], Mapping[str, str]] = lambda _: {},
    ) -> Iterator[Fleet]:
        title = f"starting {', '.join(names)}"
        with (
            self.workspace.folder(f"fleet-{time.monotonic_ns()}") as folder,
            self.steps(title, 1) as step,
            start_fleet(
                names,
                geometry,
                model=self.model,
                folder=folder,
                extra=self.extra,
                environment=environment,
            ) as fleet,
        ):
            step()
            yield fleet

    def warm_up(self, fleet: Fleet, names: Sequence[str] = ()) -> None:
        """Ask these systems, or all, for more than a host tier holds."""
        source = random.Random("warm-up")
        length = self.setting.contexts[1]
        number = fleet.geometry.host_tokens // length + 2
        with self.steps("warm-up", number) as step:
            for index in range(number):
                request = Request(f"warm-up/{index}", tuple(random_tokens(source, length)), 2)
                for name in names or fleet.systems:
                    ask_each(fleet[name].url, [request])
                step()

    # ---- Asking ----

    def choose(self, *wanted: str) -> list[str]:
        """Those of the wanted systems that take part in this run."""
        return [name for name in wanted if name in self.names]

    def ask_in_turn(
        self, fleet: Fleet, names: Sequence[str], request: Request, number: int, into: Round
    ) -> Sample:
        """One request on one system after the other; the last of the answers, for they are equal
        or nothing is reported."""
        for system in fleet.in_turn(names, number):
            (sample,) = ask_each(system.url, [request])
            into.setdefault(system.name, []).append(sample)
        return into[names[0]][-1]

    def ask_fresh(self, system: System, number: int) -> list[Sample]:
        """Prompts that nobody has asked, one at a time, to see what a prefill takes."""
        self._num_fresh += 1
        source = random.Random(f"fresh/{self._num_fresh}")
        length = self.setting.prompt_tokens
        return ask_each(
            system.url,
            [
                Request(f"fresh/{index}", tuple(random_tokens(source, length)), 1)
                for index in range(number)
            ],
        )

    def make_cold(self, systems: Sequence[System]) -> None:
        """Device and host memory of these systems emptied, then the page cache."""
        for system in systems:
            system.server.flush()
        self.workspace.settle()

    @contextlib.contextmanager
    def counting_bytes(self, fleet: Fleet, outcome: Outcome) -> Iterator[None]:
        """What each system moved to and from the disk within the block."""
        before = {name: system.bytes_moved() for name, system in fleet.systems.items()}
        yield
        for name, system in fleet.systems.items():
            after = system.bytes_moved()
            outcome.moved_bytes[name] = (
                after[0] - before[name][0],
                after[1] - before[name][1],
            )

    def note_occupancy(self, fleet: Fleet, scenario: str) -> None:
        """A point of the occupancy plot for each system."""
        at_s = time.perf_counter() - self._start_s
        for name, system in fleet.systems.items():
            taken = self.occupancy.setdefault(f"{scenario}/{name}", [])
            taken.append({"at_s": at_s, **system.occupancy()})

    @contextlib.contextmanager
    def steps(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar for one part of a scenario; call what it gives after each step."""
        with tqdm(total=total, desc=title, leave=False, dynamic_ncols=True) as bar:
            yield lambda: (bar.update(1), None)[1]

    # ---- What came of it ----

    def conclude(self, scenario: str, outcome: Outcome) -> bool:
        """Keep the raw samples; whether every answer was equal, so that ratios may be reported."""
        self.outcomes[scenario] = outcome
        unequal = unequal_labels(outcome.all_rounds)
        asked = sum(len(taken) for one in outcome.all_rounds for taken in one.values())
        self.report.raw[scenario] = {
            "conditions": outcome.conditions,
            "systems": {name: self._describe(outcome, name) for name in outcome.systems if name},
            "unequal": {label: _answers(outcome.all_rounds, label) for label in unequal},
            "samples": _plain(outcome.rounds),
            "beside": {name: _plain(taken) for name, taken in outcome.beside.items()},
        }
        if unequal:
            self.failures.append(
                f"{scenario}: {len(unequal)} of {asked} answers are not the same on all systems "
                f"(the first: {unequal[0]}), so nothing of it is compared."
            )
        else:
            self.report.note(
                f"{scenario}: {asked} answers, equal on all systems. {outcome.conditions}"
            )
        return not unequal

    def _describe(self, outcome: Outcome, name: str) -> dict[str, float]:
        figures = describe_samples(outcome.samples(name))
        if name in outcome.moved_bytes:
            read, written = outcome.moved_bytes[name]
            figures |= {"read_bytes": float(read), "written_bytes": float(written)}
            new_bytes = outcome.new_tokens * self.kv_bytes_per_token
            if new_bytes and name in ("tiered", "hicache-file"):
                figures["write_amplification"] = written / new_bytes
        return figures


def _answers(rounds: Sequence[Round], label: str) -> dict[str, list[dict[str, Any]]]:
    """What each system answered to this, and how much of the prompt it took from where."""
    return {
        name: [
            {"output_ids": sample.output_ids, "cached": sample.cached}
            for one in rounds
            for sample in one.get(name, ())
            if sample.label == label
        ]
        for name in dict.fromkeys(name for one in rounds for name in one)
    }


def _plain(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Without the answers themselves: they were compared, and they are random text."""
    return [
        {
            name: [
                {
                    key: _to_microseconds(value)
                    for key, value in dataclasses.asdict(sample).items()
                    if key != "output_ids"
                }
                for sample in samples
            ]
            for name, samples in one.items()
        }
        for one in rounds
    ]


def _to_microseconds(value: object) -> object:
    """Times without the digits that no clock has."""
    if isinstance(value, tuple):
        return [_to_microseconds(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value
