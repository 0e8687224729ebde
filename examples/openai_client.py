"""A conversation through the OpenAI client, pinned for a week, and forgotten when its user asks.

python examples/openai_client.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import uuid

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
    # Names all its turns, in every request and call; nobody can guess it.
    conversation_id = uuid.uuid4().hex
    with TierClient(options.url, api_key=options.api_key) as tiers:
        for question in ("From Rome to Oslo in a week?", "And with two days in Vienna?"):
            messages.append({"role": "user", "content": question})
            completion = chat.chat.completions.create(
                model="default",
                messages=messages,
                max_tokens=24,
                temperature=0,
                extra_body={"session_id": conversation_id},
            )
            answer = completion.choices[0].message.content
            messages.append({"role": "assistant", "content": answer})
            print("answer", repr(answer))

        pin = tiers.pin(
            conversation_id=conversation_id, name="journey", ttl=7 * 86_400, within_s=60
        )
        print("pinned", pin.num_tokens, "tokens in", pin.tier)
        for conversation in tiers.conversations():
            names = [one.name for one in conversation.pins]
            held = f"{conversation.num_tokens} tokens, {conversation.nvme} on NVMe"
            print("listed", conversation.id, held, names)

        gone = tiers.forget(conversation_id=conversation_id, within_s=60)
        print("forgot", gone.num_tokens, "tokens")
        print("pinned", tiers.conversation_page().pinned_bytes, "bytes")


if __name__ == "__main__":
    main()
