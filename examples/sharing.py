"""Two servers that share pages by an index: what one computed, the other does not compute again.

    python examples/sharing.py --first http://first:30000 --second http://second:30000

Both have the same model and were started with SGLANG_TIERED_INDEX_URL=redis://HOST:PORT in their
environment.
"""

from __future__ import annotations

import argparse
import time

import httpx

from sglang_tiered.client import TierClient

DOCUMENT = "Article 1. The parties meet once a year, in the spring, at the elder one's seat. " * 8
QUESTIONS = ("Where do they meet?", "How often do they meet?")
DEADLINE_S = 60


def ask(url: str, question: str) -> dict:
    """The answer of one server, and where the tokens of the prompt came from."""
    sampling = {"temperature": 0, "max_new_tokens": 16}
    body = {"text": DOCUMENT + question, "sampling_params": sampling}
    return httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", default="http://127.0.0.1:30000")
    parser.add_argument("--second", default="http://127.0.0.1:30001")
    options = parser.parse_args()

    print("first", repr(ask(options.first, QUESTIONS[0])["text"]))
    with TierClient(options.first) as tiers:
        stored = tiers.checkpoint(text=DOCUMENT, tier="nvme", within_s=60).num_tokens
    with TierClient(options.second) as tiers:
        deadline = time.monotonic() + DEADLINE_S
        while (found := tiers.residency(text=DOCUMENT).peer) < stored:
            if time.monotonic() > deadline:
                raise SystemExit("the second server hears nothing of the first; is the index up?")
            time.sleep(0.2)
    print("found", found, "tokens on the other server")
    answer = ask(options.second, QUESTIONS[1])
    print("second", repr(answer["text"]))
    print("loaded", answer["meta_info"]["cached_tokens_details"]["storage"], "tokens")


if __name__ == "__main__":
    main()
