"""Recorded and generated traces, scaled to the model, on every system in turn."""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from typing import TYPE_CHECKING

from serving_bench.client import Request, Sample, ask_each, ask_timed
from serving_bench.measures import (
    Outcome,
    Round,
    hit_rate,
    mean_ttft,
    round_quotients,
    throughput,
)
from serving_bench.neighbour import busy_cores
from serving_bench.returning import ttft_line
from serving_bench.setting import PAGE_SIZE
from serving_bench.systems import SYSTEMS
from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.inputs import Input
from sglang_tiered_lab.trace.prompts import prompt_tokens
from sglang_tiered_lab.trace.reuse import measure as measure_reuse
from sglang_tiered_lab.trace.rows import Row
from sglang_tiered_lab.trace.scaling import Scaling, scale
from sglang_tiered_lab.trace.sessions import with_sessions
from sglang_tiered_lab.trace.sharegpt import ConversationReader
from sglang_tiered_lab.trace.sharegpt_model import Shape, rows
from sglang_tiered_lab.trace.text import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from serving_bench.bench import Bench
    from serving_bench.setting import Setting
    from sglang_tiered_lab.trace.request import TraceRequest


SEED = 6
NUM_AT_ONCE = 4  # requests, in closed loop
# Answers of one length end together, and then whoever prefills together once does so for ever;
# those of ShareGPT differ, so ours do: each a part of its length, to save time.
ANSWER_PART, MOST_ANSWER_TOKENS = 16, 32
LOAD = 0.7  # share of the time stock SGLang would be prefilling
MOONCAKE_BLOCK_TOKENS = PAGE_SIZE  # of 512: lengths are an eighth of the trace's


def load_mooncake(
    path: Path | None, tokens_max: int, num_requests: int, *, allow_dropped: bool = False
) -> list[TraceRequest]:
    """Whole conversations drawn from the trace, about ``num_requests`` requests. Raises
    ``TraceError``."""
    requests = Input(
        path, tokens=Tokens(MOONCAKE_BLOCK_TOKENS), allow_dropped=allow_dropped
    ).load_timed(seed=SEED)
    if not requests:
        raise TraceError(f"{path} holds no request; there is nothing to replay.")
    scaling = Scaling(
        tokens_max=tokens_max,
        block_tokens=min(MOONCAKE_BLOCK_TOKENS, requests[0].block_tokens),
        num_sessions=max(1, num_requests * 2 // 3),
        seed=SEED,
    )
    return scale(requests, scaling)


def load_sharegpt(
    tokens_max: int,
    num_requests: int,
    num_passes: int,
    path: Path | None = None,
    *,
    allow_dropped: bool = False,
) -> list[list[TraceRequest]]:
    """Conversations of a file of any form, or made up from ShareGPT's published figures; as far as
    they fit the model, in as many parts of about ``num_requests`` each. Raises ``TraceError``."""
    passes: list[list[TraceRequest]] = []
    found: list[TraceRequest] = []
    if path is None:
        conversations = _made_up(100 * num_requests * num_passes)
    else:
        conversations = _sharegpt_file(path, allow_dropped)
    for turns in conversations:
        found += [turn for turn in turns if turn.context_length <= tokens_max]
        if len(found) >= num_requests:
            size = min(PAGE_SIZE, found[0].block_tokens)
            passes.append(scale(found, Scaling(tokens_max=tokens_max, block_tokens=size)))
            found = []
        if len(passes) == num_passes:
            return passes
    raise TraceError(
        f"{path} has conversations for {len(passes)} passes of {num_requests} requests of at most "
        f"{tokens_max} tokens, and {num_passes} are needed; use a larger file, or --quick."
    )


def _made_up(num_conversations: int) -> Iterator[list[TraceRequest]]:
    reader = ConversationReader(Tokens(block_tokens=PAGE_SIZE))
    for number, row in enumerate(rows(Shape(num_conversations=num_conversations, seed=SEED))):
        yield reader.decode(Row(number, number, row))[0]


def _sharegpt_file(path: Path, allow_dropped: bool) -> Iterator[list[TraceRequest]]:
    """The turns of each conversation; those of a trace that names none are inferred."""
    source = Input(path, tokens=Tokens(block_tokens=PAGE_SIZE), allow_dropped=allow_dropped)
    requests = source.stream()
    first = next(requests, None)
    if first is None:
        return
    requests = itertools.chain([first], requests)
    if first.arrival_s is not None:  # the turns of a conversation lie apart
        together: dict[str | None, list[TraceRequest]] = {}
        for request in with_sessions(list(requests)):
            together.setdefault(request.conversation, []).append(request)
        source.report()
        yield from together.values()
        return
    for _, turns in itertools.groupby(requests, key=lambda request: request.conversation):
        yield list(turns)
    source.report()


def trace_requests(
    label: str,
    trace: Sequence[TraceRequest],
    *,
    duration_s: float,
    num_output: int,
    answer_part: int = 1,
) -> list[Request]:
    """Requests over ``duration_s``, spaced as in the trace, with answers ``answer_part`` times
    shorter and cut to ``num_output``."""
    hits = measure_reuse(trace).request_hits()
    arrivals = [request.arrival_s or 0.0 for request in trace]
    span = max(arrivals[-1] - arrivals[0], 1e-9)
    return [
        Request(
            label=f"{label}/{index}",
            prompt=tuple(int(token) for token in prompt_tokens(request, seed=SEED)),
            num_output=max(1, min(num_output, request.output_length // answer_part)),
            num_reusable=int(hits[index]) * request.block_tokens,
            at_s=(arrivals[index] - arrivals[0]) / span * duration_s,
            conversation=request.conversation,
            after_s=(request.delay_s or 0.0) / span * duration_s,
        )
        for index, request in enumerate(trace)
    ]


def run_mooncake(bench: Bench) -> None:
    setting = bench.setting
    trace = load_mooncake(
        bench.trace,
        _tokens_max(setting),
        setting.trace_requests,
        allow_dropped=bench.allow_dropped,
    )
    total = sum(request.input_length for request in trace)
    duration_s = total * _prefill_s_per_token(bench) / LOAD
    requests = trace_requests(
        "mooncake", trace, duration_s=duration_s, num_output=setting.num_output
    )
    how = (
        f"over {duration_s:.0f} s (open loop, spaced as recorded, no turn before the last one's "
        f"answer, {LOAD:.0%} of stock SGLang's prefill)"
    )
    _replay(bench, "mooncake", [requests], how, ask_timed, [])


def run_sharegpt(bench: Bench) -> None:
    setting = bench.setting
    num_passes = setting.rounds * (2 if bench.neighbour else 1)
    traces = load_sharegpt(
        _tokens_max(setting),
        setting.trace_requests,
        num_passes,
        bench.sharegpt,
        allow_dropped=bench.allow_dropped,
    )
    passes, num_sessions = [], 0
    for number, trace in enumerate(traces):
        label = f"sharegpt/{number}"
        requests = trace_requests(
            label,
            trace,
            duration_s=0,
            num_output=MOST_ANSWER_TOKENS,
            answer_part=ANSWER_PART,
        )
        ordered, num_conversations = in_turns(trace, requests)
        passes.append(ordered)
        num_sessions += num_conversations
    source = f"of {bench.sharegpt.name}" if bench.sharegpt else "made up like ShareGPT's"
    how = (
        f"{num_sessions} conversations {source}, taking turns, {NUM_AT_ONCE} requests at a time "
        "(closed loop)"
    )
    ask = partial(ask_each, concurrency=NUM_AT_ONCE)
    _replay(bench, "sharegpt", passes[: setting.rounds], how, ask, passes[setting.rounds :])


def in_turns(
    trace: Sequence[TraceRequest], requests: Sequence[Request]
) -> tuple[list[Request], int]:
    """The first turn of every conversation, then the second of every one, and so on: between two
    turns a user reads, types and comes back while the others are served. With it their number."""
    num_turns: dict[str | None, int] = {}
    keyed = []
    for entry, request in zip(trace, requests, strict=True):
        turn = num_turns.get(entry.conversation, 0)
        num_turns[entry.conversation] = turn + 1
        keyed.append((turn, request))
    return [request for _, request in sorted(keyed, key=lambda pair: pair[0])], len(num_turns)


def check_sharegpt(
    path: Path, setting: Setting, *, has_neighbour: bool, allow_dropped: bool
) -> None:
    """Raise ``TraceError`` where a file has too little for a run."""
    num_passes = setting.rounds * (2 if has_neighbour else 1)
    load_sharegpt(
        _tokens_max(setting),
        setting.trace_requests,
        num_passes,
        path,
        allow_dropped=allow_dropped,
    )


def _tokens_max(setting: Setting) -> int:
    return min(4096, setting.main.device_tokens // 2)


def _replay(
    bench: Bench,
    scenario: str,
    passes: Sequence[Sequence[Request]],
    how: str,
    ask: Callable[[str, Sequence[Request]], list[Sample]],
    disturbed: Sequence[Sequence[Request]],
) -> None:
    """Every system serves each pass, in turn and from empty memory. After each one of ``passes``
    comes one of ``disturbed``, if any, beside a neighbour."""
    setting, fleet = bench.setting, bench.main_fleet()
    names = bench.choose(*SYSTEMS)
    outcome = Outcome()
    beside: list[Round] = []
    with (
        bench.counting_bytes(fleet, outcome),
        bench.steps(scenario, len(names) * (len(passes) + len(disturbed))) as step,
    ):
        for number, requests in enumerate(passes):
            parts = [(0, requests, outcome.rounds)]
            parts += [(bench.neighbour, each, beside) for each in disturbed[number : number + 1]]
            for num_cores, asked, rounds in parts:
                one: Round = {}
                for system in fleet.in_turn(names, number):
                    bench.make_cold([system])
                    with busy_cores(num_cores):
                        one[system.name] = ask(system.url, asked)
                    step()
                rounds.append(one)
    outcome.beside = {"beside a neighbour": beside}
    asked = [request for requests in [*passes, *disturbed] for request in requests]
    total = sum(len(request.prompt) for request in asked)
    reusable = sum(request.num_reusable for request in asked)
    outcome.new_tokens = total - reusable
    outputs = [request.num_output for request in asked]
    mean_output = statistics.fmean(outputs)
    num_passes = len(passes) + len(disturbed)
    num_different = (total - reusable) / num_passes / setting.main.memory_tokens
    outcome.conditions = (
        f"{len(asked)} requests in {num_passes} passes, {how}; {total:,} prompt tokens of which "
        f"{reusable / total:.0%} come again ({num_different:.1f} times device and host are "
        f"different in a pass); answers of {mean_output:.0f} tokens on average, at most "
        f"{max(outputs)}; memory and page cache emptied before each pass."
    )
    if bench.conclude(scenario, outcome):
        aim = scenario == "sharegpt"
        _report(bench, scenario, outcome.rounds, "<= 0.95" if aim else "")
        if beside:
            _report(bench, f"{scenario}_beside_neighbour", beside, "<= 0.98" if aim else "")


def _report(bench: Bench, scenario: str, rounds: list[Round], wanted: str) -> None:
    """``wanted`` is of the mean TTFT over HiCache with files."""
    rates = ", ".join(
        f"{name} {hit_rate([sample for one in rounds for sample in one[name]]):.0%}"
        for name in rounds[0]
    )
    for peer in [name for name in rounds[0] if name != "tiered"]:
        suffix = peer.replace("-", "_")
        bench.report.add(
            f"{scenario}_ttft_over_{suffix}",
            round_quotients(rounds, peer, mean_ttft),
            wanted=wanted if peer == "hicache-file" else "",
            beside=f"{ttft_line(rounds, peer)}; hit rate {rates}",
        )
        bench.report.add(
            f"{scenario}_throughput_over_{suffix}", round_quotients(rounds, peer, throughput)
        )


def _prefill_s_per_token(bench: Bench) -> float:
    """Of stock SGLang on this machine now: the median of a few cold prompts."""
    fleet = bench.main_fleet()
    name = "stock" if "stock" in bench.names else "tiered"
    samples = bench.ask_fresh(fleet[name], number=3)
    return statistics.median(sample.ttft_s / sample.num_prompt for sample in samples)
