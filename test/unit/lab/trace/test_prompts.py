"""Prompts share exactly the blocks the trace shares, in every process."""

from __future__ import annotations

import hashlib

from kit.talks import make_request
from sglang_tiered_lab.trace.prompts import prompt_tokens


def test_every_process_makes_the_same_tokens() -> None:
    tokens = prompt_tokens(make_request((7, 8)), seed=5)
    assert hashlib.sha256(bytes(tokens.tolist())).hexdigest().startswith("c1e3124d3933a7ee")
