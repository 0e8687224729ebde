"""Requests as SGLang's own ``bench_serving`` sends and times them, with what it leaves out.

The clock is upstream's (``sglang.benchmark.serving.async_request_sglang_generate``): time to the
first streamed chunk with text, gaps between chunks, time to the last. Upstream keeps the text but
not the token ids, which answers are compared by and next turns are made of, so the hook it calls
for every chunk is wrapped.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from types import ModuleType


TIERS = ("device", "host", "storage")
REQUEST_DEADLINE_S = 300.0


class RequestFailedError(Exception):
    """A server refused or broke off a request. One sentence."""


@dataclass(frozen=True)
class Request:
    """One prompt. Answers to the same ``label`` must be equal on every system."""

    label: str
    prompt: tuple[int, ...]
    num_output: int
    num_reusable: int = 0  # leading prompt tokens that were part of an earlier request or answer
    at_s: float = 0.0  # when to send it, from the start of an open-loop run
    conversation: str | None = None  # whose turns follow one another, where known
    after_s: float = 0.0  # the least since the answer to the last turn


@dataclass(frozen=True)
class Sample:
    """What became of one request. Times are seconds."""

    label: str
    started_s: float
    ttft_s: float
    itl_s: tuple[float, ...]
    latency_s: float
    num_prompt: int
    num_reusable: int
    output_ids: tuple[int, ...]
    cached: dict[str, int]  # prompt tokens by the tier they came from

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())

    @property
    def ended_s(self) -> float:
        return self.started_s + self.latency_s


def cached_by_tier(details: dict[str, Any] | None) -> dict[str, int]:
    """The three tiers of ``cached_tokens_details``; what is absent is zero."""
    return {tier: int((details or {}).get(tier) or 0) for tier in TIERS}


@functools.cache
def _upstream() -> ModuleType:
    """SGLang's client, told what its command line would have told it. Takes seconds once."""
    from sglang.benchmark import serving

    serving.args = argparse.Namespace(
        temperature=0.0,
        top_p=1.0,
        disable_ignore_eos=False,
        disable_stream=False,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        cache_report=True,
        header=None,
    )
    keep_token_ids(serving)
    return serving


def keep_token_ids(serving: Any) -> None:
    """Make upstream's result hold ``output_ids``, by the hook that sees every chunk."""
    original: Callable[[Any, Any], None] = serving._record_server_prompt_len  # noqa: SLF001

    def record(data: Any, output: Any) -> None:
        original(data, output)
        if "output_ids" in data:
            output.output_ids = tuple(data["output_ids"])

    serving._record_server_prompt_len = record  # noqa: SLF001


async def ask(url: str, request: Request) -> Sample:
    """Send one request now. Raises ``RequestFailedError``."""
    serving = _upstream()
    started_s = time.perf_counter()
    result = await asyncio.wait_for(
        serving.async_request_sglang_generate(
            serving.RequestFuncInput(
                prompt=list(request.prompt),
                api_url=f"{url}/generate",
                prompt_len=len(request.prompt),
                output_len=request.num_output,
                model="",
                lora_name=None,
                image_data=None,
                extra_request_body={},
            )
        ),
        REQUEST_DEADLINE_S,
    )
    return make_sample(request, started_s, result)


def make_sample(request: Request, started_s: float, result: Any) -> Sample:
    """Upstream's result as a sample. Raises ``RequestFailedError`` unless it is complete."""
    if not result.success:
        last = (result.error.strip() or "no reason given").splitlines()[-1]
        raise RequestFailedError(f"{request.label} failed: {last}")
    output_ids = getattr(result, "output_ids", ())
    if len(output_ids) != request.num_output:
        raise RequestFailedError(
            f"{request.label} gave {len(output_ids)} tokens, but {request.num_output} were asked."
        )
    return Sample(
        label=request.label,
        started_s=started_s,
        ttft_s=result.ttft,
        itl_s=tuple(result.itl),
        latency_s=result.latency,
        num_prompt=len(request.prompt),
        num_reusable=request.num_reusable,
        output_ids=output_ids,
        cached=cached_by_tier(result.cached_tokens_details),
    )


def ask_each(url: str, requests: Sequence[Request], concurrency: int = 1) -> list[Sample]:
    """All requests in order, ``concurrency`` of them at a time (closed loop), but none before the
    last turn of its conversation was answered: nobody sends a turn that holds an answer to come."""

    async def run() -> list[Sample]:
        gate = asyncio.Semaphore(concurrency)

        async def one(request: Request, last_turn: asyncio.Task[Sample] | None) -> Sample:
            if last_turn is not None:
                await asyncio.wait([last_turn])
            async with gate:
                return await ask(url, request)

        return await _in_order(requests, one)

    return asyncio.run(run())


def ask_timed(url: str, requests: Iterable[Request]) -> list[Sample]:
    """Each request at its ``at_s``, however many are still under way (open loop), but none before
    the last turn of its conversation was answered: a trace played faster than it was recorded
    would have users who type while they wait."""

    async def run() -> list[Sample]:
        start_s = time.perf_counter()

        async def one(request: Request, last_turn: asyncio.Task[Sample] | None) -> Sample:
            await asyncio.sleep(max(start_s + request.at_s - time.perf_counter(), 0))
            if last_turn is not None:
                await asyncio.wait([last_turn])
                await asyncio.sleep(request.after_s)
            return await ask(url, request)

        return await _in_order(requests, one)

    return asyncio.run(run())


async def _in_order(
    requests: Iterable[Request],
    one: Callable[[Request, asyncio.Task[Sample] | None], Coroutine[Any, Any, Sample]],
) -> list[Sample]:
    """Begin ``one(request, last turn of its conversation)`` for each; return what they return."""
    last: dict[str, asyncio.Task[Sample]] = {}
    tasks: list[asyncio.Task[Sample]] = []
    for index, request in enumerate(requests):
        name = request.conversation or f"unknown {index}"
        last[name] = asyncio.create_task(one(request, last.get(name)))
        tasks.append(last[name])
    return list(await asyncio.gather(*tasks))
