"""Token prompts for a trace that has none: what a server is asked when a trace is replayed.

Equal block ids become equal tokens and different ids different tokens, so a server that caches
prefixes finds the hits that the trace has, and no others. Tokens are the values of printable ASCII,
32 to 126: one byte a token for a byte-level model, and an ordinary id in any vocabulary.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.request import num_blocks_for

if TYPE_CHECKING:
    from sglang_tiered_lab.trace.request import TraceRequest


FIRST_TOKEN = 32
NUM_TOKENS = 95

_NAME_TOKENS = 10  # 95**10 > 2**64: enough to tell any two ids apart
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1

_Words: TypeAlias = npt.NDArray[np.uint64]


def prompt_length(request: TraceRequest, block_tokens: int | None = None) -> int:
    """Tokens of the prompt when every block has ``block_tokens`` instead of the trace's own; the
    last one is filled in the same part, rounded up."""
    own = request.block_tokens
    if block_tokens is None or block_tokens == own:
        return request.input_length
    full = max(0, num_blocks_for(request.input_length, own) - 1)
    rest = request.input_length - full * own
    return full * block_tokens + num_blocks_for(rest * block_tokens, own)


def prompt_tokens(
    request: TraceRequest, *, block_tokens: int | None = None, seed: int = 0
) -> npt.NDArray[np.int32]:
    """The prompt of a request: ``prompt_length(request, block_tokens)`` tokens. # [tokens]

    The same arguments give the same tokens, in any process. A block begins with its id as a number
    of up to ten digits to the base 95, shuffled by ``seed``, and goes on with tokens drawn from
    both. Two blocks with different ids differ within those digits; so do last blocks, unless they
    are filled by fewer tokens than that: one of t tokens equals another in one of 95**t cases.

    Raises ``TraceError`` when blocks are so short (below ten tokens) that an id does not fit.
    """
    size = request.block_tokens if block_tokens is None else block_tokens
    if size < 1:
        raise TraceError(f"a block of {size} tokens holds nothing; give block_tokens of 1 or more.")
    ids = request.block_ids
    num_names = min(size, _NAME_TOKENS)
    names = NUM_TOKENS**num_names
    if ids and max(ids) >= names:
        raise TraceError(
            f"block id {max(ids)} does not fit a block of {size} tokens; give blocks 10 or more."
        )
    factor, offset = _shuffle(seed, num_names)
    blocks = np.empty((len(ids), size), dtype=np.uint64)  # [blocks, tokens of a block]
    numbers = [(factor * block + offset) % names for block in ids]
    for place in range(num_names):
        blocks[:, place] = [number % NUM_TOKENS for number in numbers]
        numbers = [number // NUM_TOKENS for number in numbers]
    if size > num_names:
        keys = _mix(np.array(ids, dtype=np.uint64) ^ _mix(np.array([seed & _WORD], np.uint64)))
        places = np.arange(num_names, size, dtype=np.uint64) * _GOLDEN
        blocks[:, num_names:] = _mix(keys[:, None] + places[None, :]) % np.uint64(NUM_TOKENS)
    tokens = blocks.reshape(-1)[: prompt_length(request, size)]
    return (tokens + np.uint64(FIRST_TOKEN)).astype(np.int32)


@functools.lru_cache(maxsize=16)
def _shuffle(seed: int, num_names: int) -> tuple[int, int]:
    """A bijection of 0 ... 95**num_names - 1: times the first, plus the second, modulo that."""
    names = NUM_TOKENS**num_names
    draw = np.random.default_rng((seed & _WORD, num_names))
    factor, offset = (int(value) % names for value in draw.integers(1, 1 << 63, size=2))
    while factor % 5 == 0 or factor % 19 == 0:  # 95 = 5 * 19
        factor += 1
    return factor, offset


def _mix(values: _Words) -> _Words:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), wrapping on purpose."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
