"""Prompts share exactly the blocks the trace shares, in every process."""

from __future__ import annotations

import hashlib

import pytest

from kit.talks import make_request
from sglang_tiered_lab.trace.prompts import NUM_TOKENS, prompt_tokens


@pytest.mark.parametrize("block_tokens", [2, 3, 10, 16])
def test_blocks_of_a_large_trace_all_differ(block_tokens: int) -> None:
    number = min(20_000, NUM_TOKENS**block_tokens)
    tokens = prompt_tokens(make_request(tuple(range(number)), block_tokens=block_tokens))
    blocks = {block.tobytes() for block in tokens.reshape(number, block_tokens)}
    assert len(blocks) == number


def test_every_process_makes_the_same_tokens() -> None:
    tokens = prompt_tokens(make_request((7, 8)), seed=5)
    digest = hashlib.sha256(bytes(tokens.tolist())).hexdigest()
    assert digest.startswith("c1e3124d3933a7ee")
