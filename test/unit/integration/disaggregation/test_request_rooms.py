"""Prefill and decode give each request the same room, and no two requests one room."""

from __future__ import annotations

import copy
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_context, get_disagg
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.disaggregation import request_rooms
from sglang_tiered.integration.disaggregation.request_rooms import NUM_ROOMS, tokens_of
from sglang_tiered.transfer.messages import Asked

NUMBER = 2**62 + 12345


@pytest.fixture(autouse=True)
def apart() -> Any:
    named = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "zmq"}
    with (
        get_context().override_server_args(model_path="none", device="cpu"),
        get_disagg().override(**named),
    ):
        yield


def rooms_of(num_samples: int, prompt: list[int] | None = None, **named: Any) -> list[int]:
    """What is sent of one prompt, as SGLang copies it: a first request, and one a sample."""
    fields = {"input_ids": prompt or [1, 2, 3], "bootstrap_room": NUMBER, **named}
    request = GenerateReqInput(**fields)
    no = dict.fromkeys(("input_embeds", "mm_inputs", "token_ids_logprob", "token_type_ids"))
    tokenized = TokenizedGenerateReqInput(
        input_text="",
        input_ids=array("q", fields["input_ids"]),
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        bootstrap_room=request.bootstrap_room,
        **no,
    )
    request_rooms.after_tokenizing(tokenized, request)
    sent = []
    for _ in range(num_samples):
        sample = copy.copy(tokenized)
        request_rooms.before_dispatch(None, sample)
        sent.append(sample.bootstrap_room)
    assert all(type(room) is int for room in sent), "what messages can hold"
    return sent


def test_samples_of_one_prompt_have_distinct_rooms() -> None:
    rooms = rooms_of(65)
    assert len(set(rooms)) == 65
    assert all(0 < room < NUM_ROOMS for room in rooms)
    assert rooms == rooms_of(65), "as the other instance makes them"
    assert rooms == rooms_of(65, bootstrap_pair_key="sglang_tiered.room"), "whatever clients send"


def test_one_number_for_different_prompts_never_meets() -> None:
    """Prefill may hear of one of two requests first, and decode of the other: KV of one prompt
    would answer the other."""
    rooms = [
        *rooms_of(3),
        *rooms_of(3, [1, 2, 4]),
        *rooms_of(3, lora_path="an adapter"),
        *rooms_of(3, image_data=["http://192.0.2.1/a.png"]),
        *rooms_of(3, image_data=[{"url": "http://192.0.2.1/b.png"}]),
    ]
    assert len(set(rooms)) == len(rooms)


@pytest.mark.parametrize("number", [0, 1, NUMBER, NUM_ROOMS - 1])
def test_room_leads_to_the_same_replica(number: int) -> None:
    for room in rooms_of(5, bootstrap_room=number):
        assert 0 <= room < NUM_ROOMS
        assert all(room % replicas == number % replicas for replicas in range(1, 17))


def test_recompute_has_the_tokens_that_decode_has() -> None:
    """After a retraction, prefill gets the prompt and what decode had emitted as one prompt."""
    on_decode = req([1, 2], array("q", [3]))
    assert tokens_of(req([1, 2, 3])) == tokens_of(on_decode)
    queue = SimpleNamespace(
        transfer_backend=SimpleNamespace(value="zmq"),
        kv_manager=SimpleNamespace(
            adapters=SimpleNamespace(digest_of=lambda _: b"a", name_of=lambda _: "x")
        ),
    )
    request_rooms.before_handoff(queue, on_decode, is_rebootstrap=True)
    assert queue.kv_manager.recompute == {"bootstrap_room": NUMBER, "lora_path": "x"}
    assert rooms_of(1, lora_path="x") == [on_decode.bootstrap_room]
    assert queue.kv_manager.arriving == Asked(b"a", tokens_of(req([1, 2, 3])))


def test_tokens_tell_prompts_apart_but_not_media() -> None:
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2], [1, 2, 3, 0], [2, 1, 3]]
    assert len({tokens_of(req(prompt)) for prompt in prompts}) == len(prompts)

    def with_image(content: int, size: int) -> Any:
        made = req([1, *[9] * size, 3])
        made.origin_input_ids = array("q", [1, *[content] * size, 3])
        return tokens_of(made)

    assert with_image(10**9, 2) == with_image(10**9 + 1, 2) != with_image(10**9, 3)


def req(prompt: list[int], emitted: Any = ()) -> Any:
    """A request as SGLang's schedulers have it."""
    made = Req("1", "", array("q", prompt), SamplingParams(), bootstrap_room=NUMBER)
    made.output_ids = array("q", emitted)
    return made


@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_room": [1]},
        {"bootstrap_room": "1"},
        {"bootstrap_room": 1.5},
        {"bootstrap_room": True},
        {"bootstrap_room": -1},
        {"bootstrap_room": 2**63},
        {"bootstrap_host": 7},
        {"bootstrap_port": 65536},
        {"input_ids": [[1], [2]], "bootstrap_room": [1]},
        {"input_ids": [[1], [2]], "bootstrap_room": [1, [2]]},
        {"input_ids": [[1], [2]], "bootstrap_room": [1, 1]},
        {"input_ids": [[1], [2]], "bootstrap_host": ["192.0.2.1"], "bootstrap_room": [1, 2]},
    ],
)
def test_malformed_room_is_refused_before_anything_is_sent(fields: dict[str, Any]) -> None:
    """A list for one prompt ended both schedulers."""
    request = GenerateReqInput(**{"input_ids": [1, 2], "bootstrap_room": 1, **fields})
    problem = r"bootstrap_(room|host|port) (must be|has 1|names the same)"
    with pytest.raises(ValueError, match=problem):
        request.normalize_batch_and_arguments()
