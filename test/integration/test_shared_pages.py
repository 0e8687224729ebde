"""Latent attention on several ranks: what every rank holds alike is kept once.

The consensus checker of SGLang ends the server at the first call that two ranks make differently.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import write_latent_attention

from conftest import ALWAYS, Launch, aligned, make_prompts
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
PROMPTS = make_prompts(11, 4, LENGTH)
PAGE_BYTES = 64 * 96 * 4 * 3  # tokens, numbers of the latent vector, bytes of each, layers
KEPT = ("tier_pages:nvme", "tier_held_bytes:nvme", "stored_bytes:nvme", "tier_pages:object")


def store_prompts(server: Server) -> list[list[int]]:
    """What the server answers, once NVMe and the bucket hold all whole pages of it."""
    answers = [answer.output_ids for answer in server.generate_all(PROMPTS, concurrency=2)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        written = [*prompt, *answer[:-1]]
        for tier in ("nvme", "object"):
            told = server.request("/tier/checkpoint", {"input_ids": written, "tier": tier})
            assert told["num_tokens"] == len(written) // 64 * 64, told
    server.flush()
    return answers


def bucket_bytes(directory: Path) -> int:
    files = [path for path in (directory / "bucket").rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def test_ranks_keep_latent_attention_pages_only_once(
    launch: Launch, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    latent = write_latent_attention(model, tmp_path / "latent")
    one, two = tmp_path / "one", tmp_path / "two"

    def of_ranks(number: int, directory: Path) -> Server:
        return launch(
            *("--tp", str(number), "--max-total-tokens", "2048", "--tier-host-bytes", "16MiB"),
            *("--tier-dir", f"{directory}/kv", "--tier-object-url", f"{directory}/bucket"),
            *ALWAYS,
            model_path=latent,
        )

    alone = of_ranks(1, one)
    expected = store_prompts(alone)
    kept_by_one = [alone.tier_state()[name] for name in KEPT]
    alone.stop()

    server = of_ranks(2, two)
    assert store_prompts(server) == expected
    assert [server.tier_state()[name] for name in KEPT] == kept_by_one
    server.stop()
    shards = [sorted(path.name for path in (each / "kv").glob("shard-*")) for each in (one, two)]
    assert shards[0] == shards[1]
    # What pins, records and markers take differs by little.
    assert abs(bucket_bytes(two) - bucket_bytes(one)) < PAGE_BYTES

    restarted = of_ranks(2, two)
    answers = restarted.generate_all(PROMPTS, concurrency=3)
    assert [answer.output_ids for answer in answers] == expected
    assert [answer.cached["storage"] for answer in answers] == [aligned(LENGTH)] * len(PROMPTS)

    # No rank brings back what was purged, neither from its lender nor from the bucket.
    assert restarted.request("/tier/purge", {"all": True})["durable"]
    restarted.flush()
    answers = restarted.generate_all(PROMPTS, concurrency=3)
    assert [answer.output_ids for answer in answers] == expected
    assert not any(answer.num_cached for answer in answers)
