"""Throughput and TTFT as users come: from all conversations on the device to 9 times host memory.

A closed loop: every user sends a turn, reads the answer, thinks, and sends the next, which holds
everything said before. Users think as long as it takes for the first point's number of them to
keep stock SGLang about 95% busy, so every point beyond it is more than the server can do at once,
and what it does then is a matter of what it need not compute again.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serving_bench.client import Request, Sample, ask
from serving_bench.conversations import random_tokens
from serving_bench.measures import (
    Outcome,
    Round,
    hit_rate,
    round_quotients,
    throughput,
    ttft_percentile,
)
from serving_bench.systems import SYSTEMS
from storage_bench.figures import percentile, quotients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from serving_bench.bench import Bench
    from serving_bench.setting import Crowd
    from serving_bench.systems import Fleet


SEED = 8
BUSY = 0.95
CALIBRATIONS = 4
CALIBRATION_TURNS = 4
MIN_SAMPLES = 200  # for a p99


@dataclass
class User:
    """One conversation, which grows turn by turn from ``opening`` tokens to at most ``longest``;
    then the user goes back to its opening and takes it from there in another direction, so that
    nothing but the first turn of all is ever without history, however long the run."""

    label: str
    opening: int
    longest: int
    num_new: int
    num_output: int
    source: random.Random
    history: list[int] = field(default_factory=list)
    num_turns: int = 0

    def first_turn(self) -> Request:
        """The opening, and of what is said later as much as makes the users differ in length."""
        length = self.source.randrange(self.opening, self.longest - self.num_new)
        return self._request(random_tokens(self.source, length))

    def turn(self) -> Request:
        if len(self.history) + self.num_new + self.num_output > self.longest:
            del self.history[self.opening :]
        return self._request(random_tokens(self.source, self.num_new))

    def answered(self, request: Request, sample: Sample) -> None:
        self.history = [*request.prompt, *sample.output_ids]
        self.num_turns += 1

    def _request(self, tokens: Sequence[int]) -> Request:
        return Request(
            label=f"{self.label}/{self.num_turns}",
            prompt=(*self.history, *tokens),
            num_output=self.num_output,
            num_reusable=len(self.history),
        )


def busy_share(samples: Iterable[Sample]) -> float:
    """The share of the time in which at least one request was under way."""
    ordered = sorted((sample.started_s, sample.ended_s) for sample in samples)
    start_s = until_s = ordered[0][0]
    busy_s = 0.0
    for begun_s, ended_s in ordered:
        busy_s += max(ended_s - max(begun_s, until_s), 0.0)
        until_s = max(until_s, ended_s)
    return busy_s / (until_s - start_s)


def think_s(samples: Sequence[Sample], num_users: int) -> float:
    """How long users would have to think for the server to be busy ``BUSY`` of the time: a user's
    cycle is thinking and waiting, and the server does a cycle of each in ``num_users`` times what
    one request keeps it busy."""
    start_s = min(sample.started_s for sample in samples)
    span_s = max(sample.ended_s for sample in samples) - start_s
    service_s = busy_share(samples) * span_s / len(samples)
    wait_s = statistics.fmean(sample.latency_s for sample in samples)
    return max(num_users * service_s / BUSY - wait_s, 0.0)


def turns_each(num_users: int, num_slices: int, min_samples: int) -> int:
    """Turns of each user in each slice, so that all of them together are enough."""
    return -(-min_samples // (num_users * num_slices))


def ask_users(
    url: str, users: Sequence[User], num_turns: int, mean_think_s: float, seed: str
) -> list[Sample]:
    """Every user takes so many turns. Thinking times are exponential, the same for every system."""

    async def run_one(user: User) -> list[Sample]:
        source = random.Random(f"{seed}/{user.label}")
        samples = []
        for _ in range(num_turns):
            await asyncio.sleep(source.expovariate(1 / mean_think_s) if mean_think_s else 0.0)
            request = user.turn()
            sample = await ask(url, request)
            user.answered(request, sample)
            samples.append(sample)
        return samples

    async def run_all() -> list[Sample]:
        each = await asyncio.gather(*map(run_one, users))
        return [sample for samples in each for sample in samples]

    return asyncio.run(run_all())


def ask_first_turns(url: str, users: Sequence[User]) -> list[Sample]:
    """One after the other, so that no system forgets what it has not stored yet."""

    async def run_all() -> list[Sample]:
        samples = []
        for user in users:
            request = user.first_turn()
            sample = await ask(url, request)
            user.answered(request, sample)
            samples.append(sample)
        return samples

    return asyncio.run(run_all())


@dataclass
class _Point:
    """One number of users."""

    num_users: int
    first: Round = field(default_factory=dict)
    slices: list[Round] = field(default_factory=list)

    def samples(self, name: str) -> list[Sample]:
        return [sample for one in self.slices for sample in one[name]]

    def describe(self, name: str) -> dict[str, float]:
        taken = self.samples(name)
        ttft = [sample.ttft_s for sample in taken]
        return {
            "users": float(self.num_users),
            "samples": float(len(taken)),
            "throughput_tokens_per_s": statistics.median(
                throughput(one[name]) for one in self.slices
            ),
            "requests_per_s": statistics.median(
                len(one[name]) * throughput(one[name]) / _tokens(one[name]) for one in self.slices
            ),
            "ttft_p50_s": percentile(ttft, 0.5),
            "ttft_p99_s": percentile(ttft, 0.99),
            "busy": statistics.fmean(busy_share(one[name]) for one in self.slices),
            "hit_rate": hit_rate(taken),
        }


def _tokens(samples: Iterable[Sample]) -> int:
    return sum(sample.num_prompt + len(sample.output_ids) for sample in samples)


def run(bench: Bench) -> None:
    names = bench.choose(*SYSTEMS)
    crowd = bench.setting.crowd
    bench.close_main_fleet()
    with bench.fleet(names, crowd.geometry) as fleet:
        bench.warm_up(fleet)
        mean_think_s, calibration = _calibrate(bench, fleet)
        points: list[_Point] = []
        total = len(crowd.users) * (1 + crowd.slices)
        with bench.steps("users", total) as step:
            for num_users in crowd.users:
                points.append(_ask_point(bench, fleet, names, num_users, mean_think_s, step))
    _conclude(bench, points, mean_think_s, calibration)


def make_users(title: str, number: int, bench: Bench) -> list[User]:
    crowd, setting = bench.setting.crowd, bench.setting
    return [
        User(
            label=f"users/{title}/{index}",
            opening=crowd.contexts[0],
            longest=crowd.contexts[1],
            num_new=setting.num_new,
            num_output=setting.num_output,
            source=random.Random(f"{SEED}/{title}/{index}"),
        )
        for index in range(number)
    ]


def _calibrate(bench: Bench, fleet: Fleet) -> tuple[float, list[float]]:
    """The mean thinking time, and how busy the server was with each that was tried."""
    name = "stock" if "stock" in fleet.systems else "tiered"
    num_users = bench.setting.crowd.users[0]
    users = make_users("calibration", num_users, bench)
    url = fleet[name].url
    ask_first_turns(url, users)
    # As if nobody thought: the server's time for a request, with nothing else in it.
    found = think_s(ask_users(url, users, CALIBRATION_TURNS, 0.0, "0"), num_users)
    busy: list[float] = []
    with bench.steps("users, calibration", CALIBRATIONS) as step:
        for number in range(CALIBRATIONS):
            samples = ask_users(url, users, CALIBRATION_TURNS, found, f"calibration/{number}")
            busy.append(busy_share(samples))
            # Halfway to what this sample says: a single one is of few turns.
            found = (found + think_s(samples, num_users)) / 2
            step()
    fleet[name].server.flush()
    return found, busy


def _ask_point(
    bench: Bench,
    fleet: Fleet,
    names: list[str],
    num_users: int,
    mean_think_s: float,
    step: Callable[[], None],
) -> _Point:
    crowd = bench.setting.crowd
    bench.make_cold(list(fleet.systems.values()))
    point = _Point(num_users)
    # Every system talks with users of its own, who say the same as long as answers are equal.
    users = {name: make_users(f"{num_users}", num_users, bench) for name in names}
    for name in names:
        point.first[name] = ask_first_turns(fleet[name].url, users[name])
    step()
    num_turns = turns_each(num_users, crowd.slices, crowd.min_samples)
    for number in range(crowd.slices):
        one: Round = {}
        for system in fleet.in_turn(names, number):
            one[system.name] = ask_users(
                system.url, users[system.name], num_turns, mean_think_s, f"{num_users}/{number}"
            )
        point.slices.append(one)
        bench.note_occupancy(fleet, "users")
        step()
    return point


def _conclude(
    bench: Bench, points: list[_Point], mean_think_s: float, calibration: list[float]
) -> None:
    setting, crowd = bench.setting, bench.setting.crowd
    outcome = Outcome(
        rounds=[one for point in points for one in point.slices],
        beside={"first": [point.first for point in points]},
    )
    outcome.conditions = _conditions(crowd, points, mean_think_s, calibration, setting.num_new)
    is_equal = bench.conclude("users", outcome)
    names = outcome.systems
    described: dict[str, list[dict[str, float]]] = {
        name: [point.describe(name) for point in points] for name in names
    }
    raw: dict[str, Any] = bench.report.raw["users"]
    raw |= {"points": described, "think_s": mean_think_s, "calibration_busy": calibration}
    fewest = min(int(found["samples"]) for each in described.values() for found in each)
    if fewest < MIN_SAMPLES:
        bench.report.note(
            f"users: {fewest} samples in a point, where a p99 wants {MIN_SAMPLES}: its p99 is "
            "little more than the largest."
        )
    for name, each in described.items():
        for found in each:
            bench.report.note(
                f"users: {found['users']:.0f} on {name}: "
                f"{found['throughput_tokens_per_s']:,.0f} tokens/s, TTFT p50 "
                f"{found['ttft_p50_s'] * 1e3:,.0f} ms, p99 {found['ttft_p99_s'] * 1e3:,.0f} ms of "
                f"{found['samples']:.0f}, busy {found['busy']:.0%}, hit rate "
                f"{found['hit_rate']:.0%}."
            )
    if is_equal:
        _report(bench, names, points)


def _conditions(
    crowd: Crowd,
    points: list[_Point],
    mean_think_s: float,
    calibration: list[float],
    num_new: int,
) -> str:
    mean = statistics.fmean(crowd.contexts)
    device, host = crowd.geometry.device_tokens, crowd.geometry.host_tokens
    few, many = crowd.users[0] * mean, crowd.users[-1] * crowd.contexts[1]
    return (
        f"closed loop; conversations of {crowd.contexts[0]:,} to {crowd.contexts[1]:,} tokens that "
        f"grow by {num_new} and an answer each turn; device {device:,} and host {host:,} tokens: "
        f"{crowd.users[0]} users are {few / device:.1f} times the device, {crowd.users[-1]} are up "
        f"to {many / host:.1f} times host memory; users think {mean_think_s:.2f} s on average, "
        f"with which {crowd.users[0]} kept the server busy {calibration[-1]:.0%} of the time "
        f"(wanted {BUSY:.0%}); first turns, one at a time, are not counted; {crowd.slices} slices "
        f"per point, systems alternating, {len(points[-1].samples(next(iter(points[-1].first))))} "
        "samples in the last."
    )


def _report(bench: Bench, names: Sequence[str], points: list[_Point]) -> None:
    report = bench.report
    first, last = points[0], points[-1]
    for name in names:
        suffix = "" if name == "tiered" else f"_{name.replace('-', '_')}"
        rates = [
            statistics.median(throughput(one[name]) for one in point.slices)
            for point in (first, last)
        ]
        report.add(
            f"users_throughput_kept{suffix}",
            quotients(
                [throughput(one[name]) for one in last.slices],
                [throughput(one[name]) for one in first.slices],
            ),
            wanted=">= 0.9" if name == "tiered" else "",
            beside=f"{rates[1]:,.0f} / {rates[0]:,.0f} tokens/s at {last.num_users} / "
            f"{first.num_users} users",
        )
    for point in points:
        pooled: list[Round] = [{name: point.samples(name) for name in names}]
        for peer in [name for name in names if name != "tiered"]:
            figure = f"users_{point.num_users}"
            over = f"over_{peer.replace('-', '_')}"
            is_aim = peer == "hicache-file" and point is last
            report.add(
                f"{figure}_throughput_{over}", round_quotients(point.slices, peer, throughput)
            )
            for share in (0.5, 0.99):
                report.add(
                    f"{figure}_ttft_p{round(share * 100)}_{over}",
                    round_quotients(pooled, peer, ttft_percentile(share)),
                    wanted="<= 0.9" if is_aim and share > 0.5 else "",
                    in_table=is_aim,
                )
