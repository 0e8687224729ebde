"""The same returning turn out of every place its history can be in, and computed.

Every round opens a conversation. Its next turn, the history and as many new tokens, is then asked
where the history is in device memory, in host memory, on NVMe, on another server, in a bucket, and
nowhere. Loads are always made, and whole, so that a place is what it says; each answer must say so.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peer_bench.redis_process import find_redis, run_redis
from server_process import Server
from serving_bench.client import Request, RequestFailedError, ask_each
from serving_bench.conversations import random_tokens
from serving_bench.measures import Outcome, Round, ttft_percentile
from serving_bench.setting import PAGE_SIZE, Geometry
from serving_bench.systems import ALWAYS, ENVIRONMENT, START_DEADLINE_S, launch_arguments
from storage_bench.figures import quotients

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from serving_bench.bench import Bench
    from serving_bench.client import Sample


SEED = 9
COMPUTED = "computed"
PLACES = ("device", "host", "nvme", "peer", "bucket", COMPUTED)
# Whose pages a server counts as loaded, where SGLang says `storage` of all of them.
_LOADED = {
    "nvme": "loaded_pages:nvme",
    "peer": "loaded_pages:peer",
    "bucket": "loaded_pages:object",
}
_HELD_IN = {"peer": "peer", "bucket": "object"}  # as /tier/residency names it
_SERVER = {"device": "local", "host": "local", "nvme": "local"}  # others: of their own name
HOLDER = "holder"  # computes what the others find with it and in the bucket
LEARNING_ROUNDS = 1
KNOWN_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Sizes:
    """Of one run; ``num_history`` is in whole pages."""

    num_history: int
    rounds: int

    def geometry(self, kv_bytes_per_token: int) -> Geometry:
        """Device memory for one turn and half another, and NVMe for all rounds and some more."""
        device = max(1024, self.num_history * 3 // 2)
        tokens = (2 * self.rounds + 8) * (self.num_history + 2 * PAGE_SIZE) + 4 * device
        return Geometry(device, 3, max(tokens * kv_bytes_per_token * 3 // 2, 64 << 20))


SIZES = {"full": Sizes(4096, 20), "quick": Sizes(1024, 6), "tiny": Sizes(256, 2)}


def found_in(sample: Sample, loaded: Mapping[str, float], num_history: int) -> str | None:
    """The place that all of the history came from; None where no single one did. ``loaded`` are
    the pages that the server loaded meanwhile, by place."""
    if not sample.num_cached:
        return COMPUTED
    if sample.num_cached != num_history:
        return None
    for tier in ("device", "host"):
        if sample.cached[tier] == num_history:
            return tier
    if sample.cached["storage"] != num_history:
        return None
    # Fewer are a probe of the disk's speed.
    whole = [place for place, pages in loaded.items() if pages >= num_history // PAGE_SIZE]
    return whole[0] if len(whole) == 1 else None


@dataclass
class _Servers:
    """Those of a run by name, and how each place is brought about on them."""

    servers: dict[str, Server]
    sizes: Sizes
    geometry: Geometry
    fillers: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        source = random.Random(f"{SEED}/fillers")
        length = self.geometry.device_tokens // 2 + PAGE_SIZE
        self.fillers = [
            Request(f"filler/{number}", tuple(random_tokens(source, length)), 1)
            for number in range(2)
        ]

    def of(self, place: str) -> Server:
        return self.servers[_SERVER.get(place, place)]

    def open(self, history: Request) -> None:
        """A conversation begins: here, and on the server that others find it with."""
        for name in ("local", HOLDER):
            if name in self.servers:
                ask_each(self.servers[name].url, [history])
                tokens = {"input_ids": list(history.prompt)}
                self.servers[name].request("/tier/checkpoint", tokens)

    def bring(self, place: str, history: Request) -> None:
        """See to it that the history is there, and nowhere nearer."""
        server = self.of(place)
        server.flush()
        if place in ("device", "host"):
            ask_each(server.url, [history])  # from NVMe
        if place == "host":
            ask_each(server.url, self.fillers)
        if place in _HELD_IN:
            _wait_until_known(server, history, _HELD_IN[place])

    def loaded(self, place: str) -> dict[str, float]:
        """Pages the server of a place has loaded, by where from."""
        if place == COMPUTED:
            return {}
        state = self.of(place).tier_state()
        return {name: state.get(counter, 0.0) for name, counter in _LOADED.items()}


def _wait_until_known(server: Server, history: Request, tier: str) -> None:
    deadline = time.monotonic() + KNOWN_DEADLINE_S
    body = {"input_ids": list(history.prompt)}
    while (held := server.request("/tier/residency", body))[tier] < len(history.prompt):
        if time.monotonic() > deadline:
            raise RequestFailedError(f"same_turn: the history does not reach {tier}: {held}")
        time.sleep(0.1)


def run(bench: Bench) -> None:
    sizes = SIZES[bench.setting.name]
    places = list(PLACES)
    program = find_redis()
    if program is None:
        bench.report.note("same_turn: another server was left out: there is no redis-server.")
        places.remove("peer")
    bench.close_main_fleet()
    with contextlib.ExitStack() as held:
        folder = held.enter_context(bench.workspace.folder("same_turn"))
        index = None if program is None else held.enter_context(run_redis(program, folder))
        servers = held.enter_context(_start(bench, sizes, folder, index))
        _measure(bench, servers, places)


@contextlib.contextmanager
def _start(bench: Bench, sizes: Sizes, folder: Path, index: str | None) -> Iterator[_Servers]:
    """All servers, side by side; whoever is not asked idles."""
    geometry = sizes.geometry(bench.kv_bytes_per_token)
    bucket = ("--tier-object-url", str(folder / "bucket"))
    sharing = () if index is None else ("--tier-index", index)
    flags = {"local": (), HOLDER: (*bucket, *sharing), "bucket": bucket, "peer": sharing}
    servers: dict[str, Server] = {}
    try:
        for name in ("local", HOLDER, "bucket", *(["peer"] if sharing else []), COMPUTED):
            own = folder / name
            own.mkdir()
            if name == COMPUTED:
                arguments = launch_arguments("stock", geometry, own)
            else:
                whole = ("--tier-both-ends", "off", *flags[name])
                arguments = launch_arguments(ALWAYS, geometry, own, whole)
            servers[name] = Server.spawn(
                bench.model, folder / f"{name}.log", *arguments, environment=dict(ENVIRONMENT)
            )
        for server in servers.values():
            server.wait_until_it_generates(START_DEADLINE_S)
        yield _Servers(servers, sizes, geometry)
    finally:
        for server in servers.values():
            server.kill()


def _measure(bench: Bench, servers: _Servers, places: Sequence[str]) -> None:
    sizes, source = servers.sizes, random.Random(SEED)
    first: list[Round] = []
    rounds: list[Round] = []
    wrong: list[str] = []
    with bench.steps("same_turn", LEARNING_ROUNDS + sizes.rounds) as step:
        ask_each(servers.of("host").url, servers.fillers)  # from NVMe from now on
        number = 0
        while len(first) + len(rounds) < LEARNING_ROUNDS + sizes.rounds:
            one, elsewhere = _ask_round(bench, servers, places, source, number)
            number += 1
            if elsewhere and len(first) >= LEARNING_ROUNDS:
                wrong.append(elsewhere)
                if len(wrong) > sizes.rounds // 4 + 1:
                    raise RequestFailedError(f"same_turn: too many rounds went wrong: {wrong}")
                continue
            (first if len(first) < LEARNING_ROUNDS else rounds).append(one)
            step()
    outcome = Outcome(rounds=rounds, beside={"learning": first})
    outcome.conditions = (
        f"{len(rounds)} turns of {sizes.num_history:,} tokens of history and {PAGE_SIZE} new ones, "
        "each out of every place, one at a time; the answers say that all of the history came "
        f"from there ({len(wrong)} rounds in which one did not are left out); loads are always "
        "made; the bucket is a directory; page cache emptied before each turn."
    )
    if bench.conclude("same_turn", outcome):
        bench.report.raw["same_turn"]["left_out"] = wrong
        _report(bench, rounds, places)


def _ask_round(
    bench: Bench, servers: _Servers, places: Sequence[str], source: random.Random, number: int
) -> tuple[Round, str]:
    """One conversation's turn from every place, beginning with another one each round; and which
    place was not what it should be."""
    history = tuple(random_tokens(source, servers.sizes.num_history))
    opening = Request(f"same_turn/{number}/opening", history, 1)
    prompt = (*history, *random_tokens(source, PAGE_SIZE))
    turn = Request(f"same_turn/{number}", prompt, bench.setting.num_output, len(history))
    servers.open(opening)
    one: Round = {}
    elsewhere = ""
    turned = number % len(places)
    for place in (*places[turned:], *places[:turned]):
        servers.bring(place, opening)
        bench.workspace.settle()
        before = servers.loaded(place)
        (sample,) = ask_each(servers.of(place).url, [turn])
        after = servers.loaded(place)
        loaded = {name: after[name] - before[name] for name in before}
        if (found := found_in(sample, loaded, len(history))) != place:
            elsewhere = f"{place} was {found or 'several'}: {sample.cached}, {loaded}"
        one[place] = [sample]
    return {place: one[place] for place in places}, elsewhere


def _report(bench: Bench, rounds: Sequence[Round], places: Sequence[str]) -> None:
    def times(place: str) -> list[Sample]:
        return [sample for one in rounds for sample in one[place]]

    computed = [sample.ttft_s for sample in times(COMPUTED)]
    for place in places:
        taken = times(place)
        p50, p99 = (1e3 * ttft_percentile(share)(taken) for share in (0.5, 0.99))
        beside = f"TTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms"
        if place != COMPUTED:
            ratio = quotients([sample.ttft_s for sample in taken], computed)
            bench.report.add(f"same_turn_{place}_ttft_over_computed", ratio, beside=beside)
        bench.report.add(f"same_turn_{place}_ms_p50", [p50], in_table=place == COMPUTED)
        bench.report.add(f"same_turn_{place}_ms_p99", [p99], in_table=place == COMPUTED)
