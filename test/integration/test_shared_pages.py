"""Latent attention on several ranks: what every rank holds alike is kept once.

The consensus checker of SGLang ends the server at the first call that two ranks make differently.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import write_latent_attention

from conftest import ALWAYS, Launch, aligned, make_prompts
from server_process import Answer, Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
PROMPTS = make_prompts(11, 4, LENGTH)
PAGE_BYTES = 64 * 96 * 4 * 3  # tokens, numbers of the latent vector, bytes of each, layers


def outputs(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def arguments(directory: Path, tp_size: int) -> tuple[str, ...]:
    return (
        *("--tp", str(tp_size), "--max-total-tokens", "2048", "--tier-host-bytes", "16MiB"),
        *("--tier-dir", str(directory / "kv"), "--tier-object-url", str(directory / "bucket")),
        *ALWAYS,
    )


def store_prompts(server: Server) -> list[list[int]]:
    """What the server answers, once NVMe and the bucket hold all whole pages of it."""
    answers = outputs(server.generate_all(PROMPTS, concurrency=2))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        written = [*prompt, *answer[:-1]]
        for tier in ("nvme", "object"):
            body = {"input_ids": written, "tier": tier}
            told = server.request("/tier/checkpoint", body)
            assert told["num_tokens"] == len(written) // 64 * 64, told
    server.flush()
    return answers


def kept(server: Server) -> dict[str, float]:
    """What all tiers of the first rank hold."""
    names = ("tier_pages:nvme", "tier_held_bytes:nvme", "stored_bytes:nvme", "tier_pages:object")
    state = server.tier_state()
    return {name: state[name] for name in names}


def shards(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "kv").glob("shard-*"))


def bucket_bytes(directory: Path) -> int:
    files = [path for path in (directory / "bucket").rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def test_ranks_keep_latent_attention_pages_only_once(
    launch: Launch, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    latent = write_latent_attention(model, tmp_path / "latent")
    alone = launch(*arguments(tmp_path / "one", 1), model_path=latent)
    expected = store_prompts(alone)
    kept_by_one = kept(alone)
    alone.stop()

    server = launch(*arguments(tmp_path / "two", 2), model_path=latent)
    assert store_prompts(server) == expected
    assert kept(server) == kept_by_one
    server.stop()
    assert shards(tmp_path / "two") == shards(tmp_path / "one")
    # What pins, records and markers take differs by little.
    difference = bucket_bytes(tmp_path / "two") - bucket_bytes(tmp_path / "one")
    assert abs(difference) < PAGE_BYTES

    restarted = launch(*arguments(tmp_path / "two", 2), model_path=latent)
    answers = restarted.generate_all(PROMPTS, concurrency=3)
    assert outputs(answers) == expected
    assert [answer.cached["storage"] for answer in answers] == [aligned(LENGTH)] * len(PROMPTS)
    body = {"input_ids": PROMPTS[0]}
    told = restarted.request("/tier/residency", body)
    assert told["nvme"] == told["object"] == LENGTH // 64 * 64, told

    # No rank brings back what was purged, neither from its lender nor from the bucket.
    assert restarted.request("/tier/purge", {"all": True})["durable"]
    restarted.flush()
    answers = restarted.generate_all(PROMPTS, concurrency=3)
    assert outputs(answers) == expected
    assert not any(answer.num_cached for answer in answers)
    restarted.kill()
