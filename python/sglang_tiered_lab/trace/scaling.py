"""Shrinks a trace to a model and a machine, keeping what decides how a cache does on it.

Every length is multiplied by one factor, the block size with them, so that every request keeps its
blocks: hits, reuse distances, turns and the share of a prompt in its context stay as they were.
Fewer sessions and faster time change the load alone, as far as a sample can.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.prompts import NUM_TOKENS, prompt_length
from sglang_tiered_lab.trace.reuse import PrefixKeys
from sglang_tiered_lab.trace.sessions import with_sessions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.request import TraceRequest


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """What to shrink to; ``None`` leaves as it is.

    ``tokens_max``: of prompt and answer together. ``block_tokens``: of a block afterwards; without
    it, the largest that lets the longest request fit. With both, requests that would still be
    longer are left out. ``num_sessions``: whole conversations, drawn by ``seed``, at most.
    ``time_factor``: arrival times are multiplied by it.
    """

    tokens_max: int | None = None
    block_tokens: int | None = None
    num_sessions: int | None = None
    time_factor: float = 1.0
    seed: int = 0


def scale(requests: Sequence[TraceRequest], scaling: Scaling) -> list[TraceRequest]:
    """The scaled trace: in the same order, from time zero, with sessions and turns (inferred where
    the trace has none), and block ids that name prefixes, from 0 in order of appearance.

    Raises ``TraceError`` for what cannot be done.
    """
    if not requests:
        return []
    sizes = {request.block_tokens for request in requests}
    if len(sizes) > 1:
        raise TraceError("the trace mixes block sizes; convert it to one size first.")
    kept = _sample(with_sessions(requests), scaling)
    size = _block_tokens(kept, scaling, own=sizes.pop())
    zero = next((request.arrival_s for request in kept if request.arrival_s is not None), 0.0)
    prefixes = PrefixKeys()
    scaled = [
        _shrink(request, size, zero, scaling, prefixes)
        for request in kept
        if scaling.tokens_max is None or prompt_length(request, size) < scaling.tokens_max
    ]
    if not scaled:
        raise TraceError(
            f"no request fits {scaling.tokens_max} tokens with blocks of {size}; give more tokens "
            "or smaller blocks."
        )
    if size < 10 and len(prefixes) > NUM_TOKENS**size:
        raise TraceError(
            f"{len(prefixes)} blocks cannot all differ with {size} tokens each; give more tokens, "
            "fewer sessions, or a block size that leaves the longest requests out."
        )
    return scaled


def _sample(requests: list[TraceRequest], scaling: Scaling) -> list[TraceRequest]:
    if scaling.num_sessions is None:
        return requests
    sessions = list(dict.fromkeys(request.conversation for request in requests))
    if scaling.num_sessions >= len(sessions):
        return requests
    drawn = set(random.Random(scaling.seed).sample(sessions, scaling.num_sessions))
    return [request for request in requests if request.conversation in drawn]


def _block_tokens(requests: Sequence[TraceRequest], scaling: Scaling, own: int) -> int:
    if scaling.block_tokens is not None:
        return scaling.block_tokens
    if scaling.tokens_max is None:
        return own
    longest = max(request.context_length for request in requests)
    size = min(own, own * scaling.tokens_max // max(longest, 1))
    if size < 1:
        raise TraceError(
            f"the longest request has {longest} tokens: shrunk to {scaling.tokens_max}, its blocks "
            f"of {own} would vanish; give a block size too, which leaves the longest out."
        )
    return size


def _shrink(
    request: TraceRequest, size: int, zero: float, scaling: Scaling, prefixes: PrefixKeys
) -> TraceRequest:
    own = request.block_tokens
    input_length = prompt_length(request, size)
    output_length = round(request.output_length * size / own)
    if request.output_length:
        output_length = max(1, output_length)
    if scaling.tokens_max is not None:
        output_length = min(output_length, scaling.tokens_max - input_length)
    arrival_s, delay_s = request.arrival_s, request.delay_s
    if arrival_s is not None:
        arrival_s = (arrival_s - zero) * scaling.time_factor
    if delay_s is not None:
        delay_s *= scaling.time_factor
    return msgspec.structs.replace(
        request,
        arrival_s=arrival_s,
        delay_s=delay_s,
        input_length=input_length,
        output_length=output_length,
        block_ids=tuple(prefixes.of(request.block_ids)),
        block_tokens=size,
    )
