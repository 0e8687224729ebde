"""SGLang's real scheduler in this process, without HTTP: rounds of prompts over three tiers.

Overlap is on and prefill is chunked. The argument is the model's folder. The last line is JSON: the
tokens of each round, which tiers its prompts came from, and what the platform said, if it is there.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_PROMPTS, LENGTH, NUM_NEW = 10, 330, 6
ROUNDS = (4, 1, 4)
"""How many prompts are asked at a time."""
SMALL_REGIONS = str(Path(__file__).parents[1] / "kit" / "small_regions.yaml")
FLAGS = (
    *("--dtype", "float32", "--host", "127.0.0.1", "--port", "29917", "--log-level", "warning"),
    *("--max-total-tokens", "2048", "--tier-host-bytes", "8MiB", "--tier-load", "always"),
    *("--chunked-prefill-size", "128", "--config", SMALL_REGIONS),
)
DEADLINE_S = 240.0


def make_scheduler(model: str, folder: str, held: ExitStack) -> Any:
    """As a launcher and a scheduler process make it, in one process."""
    from sglang_tiered import launch_server as launcher
    from sglang_tiered.integration.launch import start

    flags = ["--model-path", model, "--tier-dir", f"{folder}/kv", *FLAGS]
    resolved = launcher._resolve(flags)
    start.claim_directory(resolved.config, held)
    resolved.config.to_environment()
    from sglang.srt.server_args import PortArgs, prepare_server_args

    arguments = prepare_server_args(resolved.sglang_arguments)
    arguments.resolve_once()
    from sglang.srt.managers import scheduler as module

    module.load_plugins()
    ports = PortArgs.init_new(arguments)
    rank = module.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    ranks = module.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0)
    module.publish(arguments, role="scheduler", ranks=ranks)
    return module.Scheduler(arguments, ports)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    is_done: bool = False


class Client:
    """Stands in for the processes on both sides of the scheduler: its queue in, and out."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._inbox: list[Any] = []
        self._answers: dict[str, Answer] = {}
        self._changed = threading.Condition()
        receiver = type(scheduler.request_receiver)
        receiver.recv_requests = lambda _, local_reqs=None: [*self._received(), *(local_reqs or [])]
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.maybe_sleep = lambda: time.sleep(0.001)
        sender = type(scheduler.ipc_channels.send_to_detokenizer)
        sender.send_output = lambda _, output, *rest, **more: self._take(output)

    def _received(self) -> list[Any]:
        with self._changed:
            received, self._inbox = self._inbox, []
        return received

    def _take(self, output: Any) -> None:
        with self._changed:
            for number, rid in enumerate(getattr(output, "rids", None) or ()):
                answer = self._answers[rid]
                tokens = output.output_ids[number] if output.output_ids is not None else []
                answer.tokens += [tokens] if isinstance(tokens, int) else list(tokens)
                if getattr(output, "cached_tokens_details", None):
                    answer.cached = output.cached_tokens_details[number] or answer.cached
                answer.is_done = output.finished_reasons[number] is not None
            self._changed.notify_all()

    def _submit(self, prompt: list[int]) -> Answer:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        rid = f"request-{len(self._answers)}"
        answer = self._answers[rid] = Answer()
        sampling = SamplingParams(temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)
        sampling.normalize(None)
        nothing = ("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
        options: dict[str, Any] = {"return_logprob": False, "logprob_start_len": -1}
        options |= {"top_logprobs_num": 0, "stream": False, **dict.fromkeys(nothing)}
        ids = array("q", prompt)
        request = TokenizedGenerateReqInput(
            rid=rid, input_text="", input_ids=ids, sampling_params=sampling, **options
        )
        with self._changed:
            self._inbox.append(request)
        return answer

    def ask(self, prompts: list[list[int]], at_a_time: int) -> list[Answer]:
        answers: list[Answer] = []
        for start in range(0, len(prompts), at_a_time):
            asked = [self._submit(prompt) for prompt in prompts[start : start + at_a_time]]
            deadline = time.monotonic() + DEADLINE_S
            with self._changed:
                while not all(answer.is_done for answer in asked):
                    assert time.monotonic() < deadline, "no answer"
                    self._changed.wait(1.0)
            answers += asked
        return answers

    def rounds(self, result: dict[str, Any]) -> None:
        """On a thread beside the scheduler, which ends with it."""
        source = random.Random(1)
        prompts = [[source.randrange(32, 127) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS)]
        result["rounds"], result["cached"] = [], []
        try:
            for at_a_time in ROUNDS:
                answers = self.ask(prompts, at_a_time)
                result["rounds"].append([answer.tokens for answer in answers])
                cached = [pair for answer in answers for pair in answer.cached.items()]
                result["cached"] += [tier for tier, num_tokens in cached if num_tokens]
        except Exception:
            result["error"] = traceback.format_exc()
        self._scheduler.gracefully_exit = True


def main(model: str) -> None:
    result: dict[str, Any] = {}
    with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(model, folder, held)
        result["overlap"] = bool(scheduler.enable_overlap)
        client = Client(scheduler)
        threading.Thread(target=client.rounds, args=(result,), daemon=True).start()
        try:
            scheduler.run_event_loop()
        except Exception:
            result["error"] = traceback.format_exc()
        if "ASYNC_PLATFORM_SEED" in os.environ:
            from seams import BED

            BED.device.synchronize()
            result["counts"] = BED.device.counts
            result["seams"] = BED.report.runs
            result["violations"] = BED.report.take()
        print(json.dumps(result), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
