"""A conversation through the OpenAI client, pinned for a week, and forgotten when its user asks.

python examples/openai_client.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse

import openai

from sglang_tiered.client import TierClient

SYSTEM = "You plan journeys. Answer briefly, name trains and not flights, and never guess a price."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", help="of the server, if it was started with one")
    options = parser.parse_args()

    chat = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key or "none")
    messages = [{"role": "system", "content": SYSTEM}]
    with TierClient(options.url, api_key=options.api_key) as tiers:
        for question in ("From Rome to Oslo in a week?", "And with two days in Vienna?"):
            messages.append({"role": "user", "content": question})
            completion = chat.chat.completions.create(
                model="default", messages=messages, max_tokens=24, temperature=0
            )
            answer = completion.choices[0].message.content
            messages.append({"role": "assistant", "content": answer})
            print("answer", repr(answer))

        # The id of a completion is the rid of its request: it names all tokens up to its answer.
        pin = tiers.pin(rid=completion.id, name="journey", ttl=7 * 86_400, within_s=60)
        print("pinned", pin.num_tokens, "tokens in", pin.tier)
        for conversation in tiers.conversations():
            names = [one.name for one in conversation.pins]
            print("listed", conversation.num_tokens, "tokens", conversation.nvme, "on NVMe", names)

        gone = tiers.forget(rid=completion.id, within_s=60)
        print("forgot", gone.num_tokens, "tokens")
        print("pinned", tiers.conversation_page().pinned_bytes, "bytes")


if __name__ == "__main__":
    main()
