"""A program of SGLang's frontend language that goes on where it was, after the server restarted.

    python examples/frontend_language.py save --url http://127.0.0.1:30000 --file agent.txt
    (stop the server, start it again with the same --tier-dir)
    python examples/frontend_language.py resume --url http://127.0.0.1:30000 --file agent.txt

The text of a state names its prefix, so ``state.text()`` is all that a program has to keep.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sglang

from sglang_tiered.client import TierClient

TASK = "You read logs. List what went wrong, with the time of each fault, and nothing else. Go on."


@sglang.function
def begin(s, log):
    s += sglang.system(TASK)
    s += sglang.user(log)
    s += sglang.assistant(sglang.gen("findings", max_tokens=24, temperature=0))


@sglang.function
def go_on(s, so_far, question):
    s += so_far
    s += sglang.user(question)
    s += sglang.assistant(sglang.gen("answer", max_tokens=24, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["save", "resume"])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--file", type=Path, default=Path("agent.txt"))
    parser.add_argument("--api-key", help="of the server, if it was started with one")
    options = parser.parse_args()

    server = sglang.RuntimeEndpoint(options.url, api_key=options.api_key)
    sglang.set_default_backend(server)
    with TierClient(options.url, api_key=options.api_key) as tiers:
        if options.step == "save":
            state = begin.run(log="12:03 disk full\n12:04 restarted\n12:09 disk full\n" * 8)
            print("findings", repr(state["findings"]))
            pin = tiers.pin(text=state.text(), name="agent", within_s=60)
            options.file.write_text(state.text())
            print("pinned", pin.num_tokens, "tokens")
        else:
            so_far = options.file.read_text()
            print("held", tiers.residency(text=so_far).nvme, "tokens on NVMe")
            state = go_on.run(so_far=so_far, question="Which fault came twice?")
            print("answer", repr(state["answer"]))
            details = state.get_meta_info("answer")["cached_tokens_details"]
            print("loaded", details["storage"], "tokens")
            tiers.unpin(name="agent", within_s=60)


if __name__ == "__main__":
    main()
