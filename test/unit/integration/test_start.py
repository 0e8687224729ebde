"""What would run without tiers, or cannot listen, is refused before a model is loaded."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from server_process import free_port
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import MiB
from sglang_tiered.integration import start
from sglang_tiered.integration.platforms.cpu import ReferenceCpuPlatform
from sglang_tiered.integration.start import check_ports

# ---- Models ----


SERVED = {
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "tokenizer_worker_num": 1,
    "enable_return_routed_experts": False,
    "enable_return_indexer_topk": False,
    "speculative_algorithm": None,
    "strip_thinking_cache": False,
    "pp_size": 1,
    "hicache_write_policy": "write_through",
}
MODEL = {"is_hybrid_swa": False, "full_attention_layer_ids": None}


def refusals(change: dict[str, Any], *, checkpoint_tokens: int | None = None) -> list[str]:
    """Why a server of a model would be refused. ``change`` is of either's settings."""
    given = SimpleNamespace(**{name: change.get(name, value) for name, value in SERVED.items()})
    model = SimpleNamespace(**{name: change.get(name, value) for name, value in MODEL.items()})
    model.hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    sizes = {"capacity_bytes": 64 * MiB, "region_bytes": 4 * MiB}
    nvme = NvmeConfig(directory="/kv", checkpoint_tokens=checkpoint_tokens, **sizes)
    return [*start.refusals(given, TieredConfig(mode=TierMode.NVME, nvme=nvme), model)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"disable_radix_cache": True}, "turns its radix cache off for LlamaForCausalLM"),
        (
            {"is_hybrid_swa": True, "full_attention_layer_ids": []},
            "every layer of Llama",
        ),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2 .*/tier calls.* image hashes"),
    ],
)
def test_what_would_run_without_tiers_is_refused(change: dict[str, Any], sentence: str) -> None:
    (message,) = refusals(change)
    assert re.search(sentence, message)
    assert message.endswith("pass --tier-mode off.") and "\n" not in message
    assert not refusals({"disable_radix_cache": True, "disaggregation_mode": "decode"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"strip_thinking_cache": True}, "--strip-thinking-cache"),
        ({"pp_size": 2}, "--pp-size"),
        ({"hicache_write_policy": "write_back"}, "--hicache-write-policy write_back"),
        ({"is_hybrid_swa": True}, "a sliding window"),
    ],
)
def test_checkpoints_that_would_keep_nothing_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    assert not refusals(change)
    (message,) = refusals(change, checkpoint_tokens=64)
    assert "--tier-checkpoint-tokens" in message and f"with {reason}; drop" in message


@pytest.mark.parametrize(
    "given", [{"speculative_algorithm": "NGRAM"}, {"lora_paths": ["a=b"]}, {"enable_lora": True}]
)
def test_what_needs_a_gpu_is_refused_early(given: dict[str, Any]) -> None:
    """SGLang looks for the EAGLE family only; n-grams would end the scheduler."""
    settings = {"speculative_algorithm": None, "lora_paths": None, "enable_lora": None, **given}
    with pytest.raises(ConfigError, match=r"needs? a GPU"):
        ReferenceCpuPlatform().apply_server_args_defaults(SimpleNamespace(**settings))


@pytest.mark.parametrize("name", ["enable_return_routed_experts", "enable_return_indexer_topk"])
def test_rows_kept_by_slot_are_refused(name: str) -> None:
    """A prefix from a tier would answer with the rows of whoever had its slots before."""
    (message,) = refusals({name: True})
    assert "would answer with rows of other" in message


# ---- Ports ----


@pytest.fixture
def taken() -> Iterator[int]:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        yield port


def test_second_prefill_server_is_refused_its_port(taken: int) -> None:
    """Its ranks registered over those of the first, whose requests then went astray."""
    prefill = {"port": 0, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": taken}
    said = f"--disaggregation-bootstrap-port {taken} is in use on 127.0.0.1"
    for serves_http in (True, False):
        with pytest.raises(ConfigError, match=said):
            check_ports(prefill, serves_http=serves_http)
    check_ports({**prefill, "node_rank": 1})
    check_ports({**prefill, "disaggregation_mode": "decode"})


@pytest.mark.parametrize("name", ["grpc_port", "nccl_port", "kv_events_config"])
def test_every_port_of_a_flag_is_looked_at(taken: int, name: str) -> None:
    events = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{taken}"})
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {taken} is in use"):
        check_ports({"port": 0, name: events if "events" in name else taken})
