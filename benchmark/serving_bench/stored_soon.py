"""Whether what a busy server computed is stored soon, and a hit after ``kill -9``."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving_bench.client import Request, Sample, ask_each
from serving_bench.conversations import random_tokens
from serving_bench.measures import Round, hit_rate, hits_by_tier
from serving_bench.neighbour import busy_cores
from serving_bench.setting import PAGE_SIZE
from serving_bench.systems import START_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from serving_bench.bench import Bench
    from serving_bench.conversations import Conversation
    from serving_bench.systems import Fleet, System


BOUND_S = 30.0
LOAD_S = BOUND_S + 5.0  # so that a turn of its beginning would show that it was not stored
POLL_S = 0.2
MAX_ASKED = 48  # turns after the restart


@dataclass(frozen=True)
class Turn:
    """A prompt with its answer, and when that was complete."""

    label: str
    tokens: tuple[int, ...]
    answered_s: float

    @property
    def num_kept(self) -> int:
        """Tokens of its whole pages; the KV of an answer's last token is never computed."""
        return (len(self.tokens) - 1) // PAGE_SIZE * PAGE_SIZE


def answered_turns(requests: Sequence[Request], samples: Sequence[Sample]) -> list[Turn]:
    return [
        Turn(request.label, (*request.prompt, *sample.output_ids), sample.ended_s)
        for request, sample in zip(requests, samples, strict=True)
    ]


@dataclass
class Watch:
    """Asks again and again which turns are stored whole; ``num_stored`` says how many leading
    tokens of a prompt are."""

    num_stored: Callable[[Sequence[int]], int]
    clock: Callable[[], float] = time.perf_counter
    turns: list[Turn] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)  # at which turns were found stored
    _pending: list[Turn] = field(default_factory=list)

    def add(self, turns: Sequence[Turn]) -> None:
        self.turns += turns
        self._pending += turns

    def poll(self) -> None:
        for turn in list(self._pending):
            if self.num_stored(turn.tokens) >= turn.num_kept:
                self.ages_s.append(self.clock() - turn.answered_s)
                self._pending.remove(turn)

    def all_ages_s(self, end_s: float) -> list[float]:
        """Also of turns that nobody has seen stored: what they had waited by the end."""
        return [*self.ages_s, *(end_s - turn.answered_s for turn in self._pending)]


@dataclass
class Kept:
    """What one server was seen to keep."""

    ages_s: list[float]
    num_young: int  # turns that the server was killed too soon after
    held_share: float  # of old turns' whole pages, those found on NVMe after the restart
    after: Round  # the old turns, asked again


def run(
    bench: Bench, fleet: Fleet, conversations: Sequence[Conversation], asked: Sequence[Turn]
) -> Kept:
    """Keep `tiered` busy with new turns and see when each is stored; end it by ``kill -9``, start
    it again, and ask for all turns that were older than the bound. ``asked``: earlier turns."""
    system = fleet["tiered"]
    watch = Watch(lambda tokens: _num_stored(system, tokens))
    with busy_cores(bench.neighbour), _polling(watch), bench.steps("device, busy", 1) as step:
        _keep_busy(bench, system, conversations, watch)
        step()
    system.server.kill()
    killed_s = time.perf_counter()
    system.respawn()
    system.server.wait_until_it_generates(START_DEADLINE_S)
    warm = tuple(random_tokens(random.Random("kept"), PAGE_SIZE))
    ask_each(system.url, [Request("warm-up", warm, 2)])

    turns = [*asked, *watch.turns]
    old = [turn for turn in turns if killed_s - turn.answered_s > BOUND_S]
    held = sum(min(_num_stored(system, turn.tokens), turn.num_kept) for turn in old)
    after: Round = {}
    chosen = old[:: -(-len(old) // MAX_ASKED)]
    with bench.steps("device, after kill -9", len(chosen)) as step:
        for number, turn in enumerate(chosen):
            size = len(turn.tokens)
            request = Request(f"{turn.label}/after kill", turn.tokens, 1, size - 1)
            bench.ask_in_turn(fleet, bench.choose("stock", "tiered"), request, number, after)
            step()
    bench.warm_up(fleet, ["tiered"])
    return Kept(
        ages_s=watch.all_ages_s(killed_s),
        num_young=len(turns) - len(old),
        held_share=held / sum(turn.num_kept for turn in old),
        after=after,
    )


def report(bench: Bench, kept: Kept) -> None:
    cores = f"; {bench.neighbour} cores kept busy" if bench.neighbour else ""
    bench.report.add(
        "device_unstored_s",
        kept.ages_s,
        wanted=f"max <= {BOUND_S:.0f}",
        beside=f"age of {len(kept.ages_s)} new turns when found on NVMe{cores}",
    )
    samples = kept.after["tiered"]
    hits = ", ".join(f"{tier} {number:,}" for tier, number in hits_by_tier(samples).items())
    bench.report.add(
        "device_hit_rate_after_kill",
        [hit_rate(samples)],
        wanted="1",
        beside=f"{len(samples)} turns older than {BOUND_S:.0f} s: tokens of {hits}; NVMe holds "
        f"{kept.held_share:.2%} of all such turns; {kept.num_young} were younger",
    )


def _num_stored(system: System, tokens: Sequence[int]) -> int:
    number: int = system.server.request("/tier/residency", {"input_ids": list(tokens)})["nvme"]
    return number


def _keep_busy(
    bench: Bench, system: System, conversations: Sequence[Conversation], watch: Watch
) -> None:
    """Clients that each send one new turn of a conversation after the other."""
    setting = bench.setting
    until_s = time.perf_counter() + LOAD_S

    def client(index: int) -> None:
        source = random.Random(f"stored soon/{index}")
        number = 0
        while time.perf_counter() < until_s:
            history = conversations[(index + number) % len(conversations)].history
            prompt = (*history, *random_tokens(source, setting.num_new))
            label = f"device/busy/{index}/{number}"
            request = Request(label, prompt, setting.num_output, len(history))
            watch.add(answered_turns([request], ask_each(system.url, [request])))
            number += 1

    with ThreadPoolExecutor(setting.per_round) as pool:
        list(pool.map(client, range(setting.per_round)))


@contextlib.contextmanager
def _polling(watch: Watch) -> Iterator[None]:
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_S):
            watch.poll()

    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(poll)
        try:
            yield
        finally:
            ended.set()
        polled.result()
