"""A request that has ended, for tests of what is written of one."""

from __future__ import annotations

from sglang_tiered.integration.observe.story import End, Story


def ended(rid: str, *, at: float = 12.5, reason: str = "stop") -> tuple[Story, End]:
    """One that arrived at 10 s of its server's clock, with a prompt of 100 tokens."""
    end = End(
        at=at,
        unix_minus_clock_s=1000.0,
        rid=rid,
        reason=reason,
        tenant="",
        arrived_at=10.0,
        admitted_at=10.5,
        first_token_at=11.0,
        num_prompt_tokens=100,
        num_output_tokens=7,
        num_retractions=0,
        num_device=0,
        num_host=0,
        num_storage=0,
    )
    return Story(10.0), end
