"""A request that has ended, for tests of what is written of one."""

from __future__ import annotations

from sglang_tiered.integration.observe.story import Story


def ended(rid: str, *, at: float = 12.5, reason: str = "stop") -> Story:
    """One that arrived at 10 s of its server's clock, with a prompt of 100 tokens."""
    story = Story.begins(10.0)
    line = story.line
    line.rid, line.end, line.total_s = rid, reason, at
    line.admitted_s, line.first_token_s = 10.5, 11.0
    line.num_prompt_tokens, line.num_output_tokens = 100, 7
    story.unix_minus_clock_s = 1000.0
    return story
