"""SGLang's engine in this process, with the tiers: no server, no HTTP.

    python examples/engine.py --model-path Qwen/Qwen3-8B --tier-dir /mnt/nvme/kv

Run it twice: the second run loads what the first one stored.
"""

from __future__ import annotations

import argparse

import sglang_tiered

MANUAL = "Hold the red button for three seconds. The lamp turns green. Close the lid and wait. " * 4
QUESTIONS = ("Which button?", "For how long?", "Which colour?", "What then?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tier-dir", required=True)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    # The arguments of the server, with underscores. The small sizes let it run on a laptop.
    with sglang_tiered.Engine(
        model_path=options.model_path,
        dtype=options.dtype,
        max_total_tokens=8192,
        tier_dir=options.tier_dir,
        tier_host_bytes="256MiB",
        tier_nvme_bytes="1GiB",
    ) as engine:
        prompts = [MANUAL + question for question in QUESTIONS]
        answers = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 16})
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print("answer", question, repr(answer["text"]))
        pin = engine.pin(rid=answers[0]["meta_info"]["id"], name="manual", ttl=3600, within_s=60)
        print("pinned", pin.num_tokens, "tokens")
        print("held", engine.residency(text=MANUAL))


# SGLang starts its processes by importing this file again.
if __name__ == "__main__":
    main()
