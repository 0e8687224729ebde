"""What the handoff adds to the time to first token, against one server that does both."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefill_decode import ENVIRONMENT, PrefillDecode
from server_process import Server

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class TTFT:
    """Seconds per prompt of one length, each side."""

    both: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)


def measure(model: Path, logs: Path, lengths: tuple[int, ...], num_rounds: int) -> dict[int, TTFT]:
    """Cold prompts of each length, to the pair and to one server in turns, nothing else running.
    Raises when the first tokens differ."""
    flags = ("--tier-mode", "off", "--max-total-tokens", str(4 * max(lengths)), "--page-size", "64")
    source, found = random.Random(7), {length: TTFT() for length in lengths}
    with (
        Server.spawn(model, logs / "single.log", *flags, environment=ENVIRONMENT) as single,
        PrefillDecode.spawn(model, logs, *flags) as pair,
    ):
        single.wait_until_it_generates()
        for number in range(num_rounds + 1):  # the first connects and warms, and is not counted
            for length in lengths:
                prompt = [source.randrange(32, 127) for _ in range(length)]
                begun = time.perf_counter()
                reply = pair.generate(prompt, 1)
                middle = time.perf_counter()
                answer = single.generate(prompt, 1)
                ended = time.perf_counter()
                if reply.output_ids != answer.output_ids:
                    raise RuntimeError(f"first tokens differ for a prompt of {length} tokens")
                if number:
                    found[length].both.append(middle - begun)
                    found[length].single.append(ended - middle)
    return found
