"""A conversation that leaves one server and arrives at another, through a bucket that both use.

    python examples/move.py leave --url http://first:30000 --file talk.json
    python examples/move.py arrive --url http://second:30000 --file talk.json

Both servers have the same model and the same --tier-object-url, which may be a shared directory
(/mnt/shared/kv). The first may be gone when the conversation arrives.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import httpx

from sglang_tiered.client import TierClient

OPENING = "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail. "
DEADLINE_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["leave", "arrive"])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--file", type=Path, default=Path("talk.json"))
    parser.add_argument("--api-key", help="of the servers, if they were started with one")
    options = parser.parse_args()

    keys = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    http = httpx.Client(base_url=options.url, headers=keys, timeout=300)
    with http, TierClient(options.url, api_key=options.api_key) as tiers:
        if options.step == "leave":
            text = OPENING * 8
        else:
            talk = json.loads(options.file.read_text())
            text = talk["text"]
            deadline = time.monotonic() + DEADLINE_S
            while (held := tiers.residency(text=text).object) < talk["num_tokens"]:
                if time.monotonic() > deadline:
                    raise SystemExit("this server sees none of it; is it the same bucket?")
                time.sleep(0.5)
            print("held", held, "tokens in the bucket")

        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
        answer = http.post("/generate", json=body).raise_for_status()
        said, about = answer.json()["text"], answer.json()["meta_info"]
        print("answer", repr(said))

        if options.step == "leave":
            kept = tiers.checkpoint(rid=about["id"], tier="object", within_s=120)
            talk = {"text": text + said, "num_tokens": kept.num_tokens}
            options.file.write_text(json.dumps(talk))
            print("left", kept.num_tokens, "tokens in the bucket")
        else:
            print("loaded", about["cached_tokens_details"]["storage"], "tokens")


if __name__ == "__main__":
    main()
