"""Two servers that share pages: what one computed, the other does not compute again.

    python examples/sharing.py --first http://first:30000 --second http://second:30000

Both have the same model and were started with --tier-peers FIRST:PORT,SECOND:PORT.
"""

from __future__ import annotations

import argparse
import time

import httpx

from sglang_tiered.client import TierClient

DOCUMENT = "Article 1. The parties meet once a year, in the spring, at the elder one's seat. " * 8
QUESTIONS = ("Where do they meet?", "How often do they meet?")
DEADLINE_S = 60


def ask(url: str, question: str, api_key: str | None) -> dict:
    """The answer of one server, and where the tokens of the prompt came from."""
    sampling = {"temperature": 0, "max_new_tokens": 16}
    body = {"text": DOCUMENT + question, "sampling_params": sampling}
    keys = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    answer = httpx.post(f"{url}/generate", json=body, headers=keys, timeout=300)
    return answer.raise_for_status().json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", default="http://127.0.0.1:30000")
    parser.add_argument("--second", default="http://127.0.0.1:30001")
    parser.add_argument("--api-key", help="of the servers, if they were started with one")
    options = parser.parse_args()

    print("first", repr(ask(options.first, QUESTIONS[0], options.api_key)["text"]))
    with TierClient(options.first, api_key=options.api_key) as tiers:
        stored = tiers.checkpoint(text=DOCUMENT, tier="nvme", within_s=60).num_tokens
    with TierClient(options.second, api_key=options.api_key) as tiers:
        deadline = time.monotonic() + DEADLINE_S
        while (found := tiers.residency(text=DOCUMENT).peer) < stored:
            if time.monotonic() > deadline:
                raise SystemExit(
                    "the second server hears nothing of the first; do they share pages?"
                )
            time.sleep(0.2)
    print("found", found, "tokens on the other server")
    answer = ask(options.second, QUESTIONS[1], options.api_key)
    print("second", repr(answer["text"]))
    print("loaded", answer["meta_info"]["cached_tokens_details"]["storage"], "tokens")


if __name__ == "__main__":
    main()
