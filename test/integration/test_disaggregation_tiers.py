"""Tiers on both sides of a handoff: however decode's disk behaves no request fails, and prefill
goes on with what decode answered where they share a tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_server import ObjectServer, s3_environment
from redis_server import RedisServer

from conftest import PAGE, Disk, make_prompts, residency, until
from prefill_decode import PrefillDecode, Reply

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 10, 1500
PROMPTS = make_prompts(91, NUM_PROMPTS, LENGTH)
HANG_S = 10.0  # of each read, many times what prefill takes
CHUNKS = ("--chunked-prefill-size", "512")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_disk_slower_than_prefill_delays_no_request(
    num_ranks: int, disk: Disk, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks of decode agreed on is compared by SGLang's own checker."""
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    off = ("--tier-mode", "off", "--page-size", str(PAGE), "--max-total-tokens", "16384")
    tiers = ("--tp", str(num_ranks), "--max-total-tokens", "4096", "--tier-host-bytes", "36MiB")
    tiers += ("--tier-dir", str(tmp_path / "kv"))
    with PrefillDecode.spawn(model, tmp_path, *CHUNKS, prefill=off, decode=tiers) as pair:

        def ask() -> list[Reply]:
            return pair.generate_all(PROMPTS, concurrency=2)

        expected = [reply.output_ids for reply in ask()]
        pair.decode.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // PAGE))
        pair.decode.flush()
        disk.order(read_s=HANG_S)
        replies = ask()
        disk.order()
        assert [reply.output_ids for reply in replies] == expected
        assert max(reply.seconds for reply in replies) < HANG_S, "a request waited for the disk"
        state = pair.decode.tier_state()
        decided = ("load_decision_tokens:gave_up", "load_decision_tokens:declined")
        assert sum(state.get(name, 0) for name in decided) > 0
        assert [reply.output_ids for reply in ask()] == expected


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The flags of the tiers that both instances share."""
    with RedisServer() as redis, ObjectServer() as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        bucket = f"s3://{server.make_bucket()}/kv"
        yield ["--tier-index", redis.url, "--tier-object-url", bucket]


def test_prefill_finds_the_answer_that_decode_computed(
    sharing: list[str], model: Path, tmp_path: Path
) -> None:
    opening = make_prompts(92, 1, 700)[0]
    with PrefillDecode.spawn(
        model,
        tmp_path,
        *("--max-total-tokens", "8192", *CHUNKS, "--tier-host-bytes", "64MiB", *sharing),
        prefill=("--tier-dir", str(tmp_path / "prefill"), "--tier-load", "always"),
        decode=("--tier-dir", str(tmp_path / "decode")),
    ) as pair:
        turn = [*opening, *pair.generate(opening, 400).output_ids]
        wanted = 0.95 * len(turn)
        for shared in ("peer", "object"):
            until(lambda at=shared: residency(pair.prefill, turn)[at] >= wanted, shared)
        prefilled, decoded = pair.both([*turn, *make_prompts(93, 1, 100)[0]])
        assert decoded.status == 200, decoded.error
        found: dict[str, Any] = prefilled.body["meta_info"]
        assert found["cached_tokens"] >= wanted, found
        servers = (pair.prefill, pair.decode)
        first, second = (server.request("/tier/costs")["ranks"][0] for server in servers)
        assert (first["role"], second["role"]) == ("prefill", "decode")
        assert first["bootstrap_port"] and second["bootstrap_port"] is None
