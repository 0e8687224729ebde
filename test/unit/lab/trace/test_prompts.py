"""Prompts share exactly the blocks the trace shares, in every process."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

from kit.talks import make_request
from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.prompts import FIRST_TOKEN, NUM_TOKENS, prompt_length, prompt_tokens
from sglang_tiered_lab.trace.request import MAX_BLOCK_ID


def test_tokens_are_printable_and_of_the_prompts_number() -> None:
    request = make_request((0, 1, MAX_BLOCK_ID), missing=7)
    tokens = prompt_tokens(request)
    assert tokens.shape == (request.input_length,) == (41,)
    assert tokens.dtype == np.int32
    assert tokens.min() >= FIRST_TOKEN
    assert tokens.max() < FIRST_TOKEN + NUM_TOKENS
    assert bytes(tokens.tolist()).decode("ascii").isprintable()
    whole = prompt_tokens(make_request((0, 1, MAX_BLOCK_ID)))
    assert (tokens == whole[: len(tokens)]).all(), "a cut block begins the whole block"
    assert len(prompt_tokens(make_request(()))) == 0


def test_ids_and_tokens_are_equal_only_together() -> None:
    first = prompt_tokens(make_request((3, 4, 5)))
    second = prompt_tokens(make_request((3, 9, 5, 6)))
    assert (first[:16] == second[:16]).all()
    assert (first[16:32] != second[16:32]).any()
    assert (first[32:48] == second[32:48]).all()


@pytest.mark.parametrize("block_tokens", [2, 3, 10, 16])
def test_blocks_of_a_large_trace_all_differ(block_tokens: int) -> None:
    number = min(20_000, NUM_TOKENS**block_tokens)
    tokens = prompt_tokens(make_request(tuple(range(number)), block_tokens=block_tokens))
    blocks = {block.tobytes() for block in tokens.reshape(number, block_tokens)}
    assert len(blocks) == number


def test_ids_one_bit_apart_have_different_blocks() -> None:
    ids = (0, *(1 << bit for bit in range(64)), MAX_BLOCK_ID)
    blocks = prompt_tokens(make_request(ids)).reshape(-1, 16)[:, :10]
    assert all((one != other).any() for one, other in itertools.combinations(blocks, 2))


def test_a_seed_changes_every_block_and_nothing_else() -> None:
    request = make_request((1, 2, 3))
    first, second = (prompt_tokens(request, seed=seed).reshape(-1, 16) for seed in (0, 1))
    assert all((one != other).any() for one, other in zip(first, second, strict=True))
    assert (first == prompt_tokens(request, seed=0).reshape(-1, 16)).all()


def test_smaller_blocks_keep_the_number_of_blocks() -> None:
    request = make_request((1, 2, 3), block_tokens=512, missing=511)
    assert prompt_length(request, 16) == 33
    assert len(prompt_tokens(request, block_tokens=16)) == 33
    assert prompt_length(request, 512) == prompt_length(request) == 1025


def test_a_block_smaller_than_its_id_is_refused() -> None:
    with pytest.raises(TraceError, match="9025 does not fit a block of 2 tokens"):
        prompt_tokens(make_request((9025,), block_tokens=2))
    with pytest.raises(TraceError, match="block of 0 tokens"):
        prompt_tokens(make_request((1,)), block_tokens=0)


def test_every_process_makes_the_same_tokens() -> None:
    tokens = prompt_tokens(make_request((7, 8)), seed=5)
    digest = hashlib.sha256(bytes(tokens.tolist())).hexdigest()
    assert digest.startswith("c1e3124d3933a7ee")
