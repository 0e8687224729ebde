"""SGLang's real scheduler in this process, without HTTP: rounds of prompts over three tiers.

Overlap is on and prefill is chunked. Arguments: the model's folder, then a mutation or ``none``.
The last line is JSON: the tokens of each round, where prompts came from, and what the platform
said, if this process is on it.
"""

from __future__ import annotations

import json
import os
import queue
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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


# ---- Mutations: planted faults of SGLang or of this package ----


def nothing_waits_for_loads(scheduler: Any) -> None:
    from sglang.srt.managers.cache_controller import LayerDoneCounter

    LayerDoneCounter.wait_until = lambda self, threshold: None


def copies_count_as_done_at_once(scheduler: Any) -> None:
    def writing_check(self: Any, write_back: bool = False, finish_count: int | None = None) -> None:
        acks = self.cache_controller.ack_write_queue
        while acks:
            for node_id in acks.pop(0).node_ids:
                self._finish_write_through_ack(node_id)

    type(scheduler.tree_cache).writing_check = writing_check


def nodes_are_stored_while_they_are_copied(scheduler: Any) -> None:
    """As a checkpoint did that was asked for after every insertion."""
    from sglang_tiered.integration.cache.host_copies import HostCopies

    HostCopies.is_being_copied = lambda self, node_id: False  # type: ignore[method-assign]
    cache = type(scheduler.tree_cache)
    check = cache.check_hicache_events

    def check_and_store(self: Any) -> None:
        self.flush_pending_backups()
        for pending in list(self.ongoing_write_through.values()):
            try:
                path = self.tree_core.collect_path_info([pending.publish_node_ids[-1]])[0]
            except KeyError:
                continue
            self.tiering.store_soon(path)
        check(self)

    cache.check_hicache_events = check_and_store


def copies_begin_at_once(scheduler: Any) -> None:
    """Not when the batch's result is there but with the insertion, a forward earlier. Right as
    long as the fence is there."""
    cache = type(scheduler.tree_cache)
    track = cache._track_write_through_node

    def track_and_begin(self: Any, *arguments: Any, **named: Any) -> None:
        track(self, *arguments, **named)
        self.cache_controller.start_writing()

    cache._track_write_through_node = track_and_begin


def copies_begin_at_once_without_a_fence(scheduler: Any) -> None:
    scheduler.tree_cache.cache_controller.write_fence_stream = None
    copies_begin_at_once(scheduler)


def prefills_teach_twice(scheduler: Any) -> None:
    from sglang_tiered.integration.cache.load_planner import LoadPlanner

    note = LoadPlanner.note_batch

    def note_again(self: Any, *arguments: Any) -> None:
        note(self, *arguments)
        note(self, *arguments)

    LoadPlanner.note_batch = note_again  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[Any], None]] = {
    "none": lambda scheduler: None,
    **{
        mutation.__name__: mutation
        for mutation in (
            nothing_waits_for_loads,
            copies_count_as_done_at_once,
            nodes_are_stored_while_they_are_copied,
            copies_begin_at_once,
            copies_begin_at_once_without_a_fence,
            prefills_teach_twice,
        )
    },
}


# ---- The scheduler ----


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
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._answers: dict[str, Answer] = {}
        self._changed = threading.Condition()
        receiver = type(scheduler.request_receiver)
        receiver.recv_requests = lambda _, local_reqs=None: [*self._received(), *(local_reqs or [])]
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.maybe_sleep = lambda: time.sleep(0.001)
        sender = type(scheduler.ipc_channels.send_to_detokenizer)
        sender.send_output = lambda _, output, *rest, **more: self._take(output)

    def _received(self) -> list[Any]:
        received = []
        while not self._inbox.empty():
            received.append(self._inbox.get_nowait())
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
        self._inbox.put(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text="",
                input_ids=array("q", prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )
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
                tiers = {"device": 0, "host": 0, "storage": 0}
                for answer in answers:
                    for tier in tiers:
                        tiers[tier] += answer.cached.get(tier) or 0
                result["cached"].append(tiers)
        except Exception:
            result["error"] = traceback.format_exc()
        self._scheduler.gracefully_exit = True


def main(model: str, mutation: str) -> None:
    result: dict[str, Any] = {}
    with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(model, folder, held)
        result["overlap"] = bool(scheduler.enable_overlap)
        MUTATIONS[mutation](scheduler)
        client = Client(scheduler)
        threading.Thread(target=client.rounds, args=(result,), daemon=True).start()
        try:
            scheduler.run_event_loop()
        except Exception:  # a mutation may break it
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
