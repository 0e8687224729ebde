"""Tiers on both sides of a handoff: decode's hits are not sent again, however its disk behaves no
request fails, and prefill goes on with what decode answered where they share a tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from object_server import ObjectServer, s3_environment
from redis_server import RedisServer

from conftest import PAGE, Disk, aligned, make_prompts, residency, until
from prefill_decode import PrefillDecode, Reply, transfer_state
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 10, 1500
PROMPTS = make_prompts(91, NUM_PROMPTS, LENGTH)
HANG_S = 10.0  # of each read, many times what prefill takes
DEVICE = ("--max-total-tokens", "4096", "--chunked-prefill-size", "512")


@dataclass
class Tiered:
    """A pair whose decode instance loads from a disk that tests make slow."""

    pair: PrefillDecode
    expected: list[list[int]] = field(default_factory=list)
    cold_bytes: int = 0  # handed over where decode holds nothing

    @property
    def decode(self) -> Server:
        return self.pair.decode

    def ask(self) -> list[Reply]:
        return self.pair.generate_all(PROMPTS, concurrency=2)

    def num_handed_over(self) -> int:
        state = transfer_state(self.decode)
        return state["transfer_bytes:wire"] + state["transfer_bytes:same_host"]

    def ask_again(self) -> list[Reply]:
        """All answer as before."""
        replies = self.ask()
        assert [reply.error for reply in replies if reply.status != 200] == []
        assert [reply.output_ids for reply in replies] == self.expected
        return replies


@contextmanager
def tiered_pair(model: Path, folder: Path, num_ranks: int, load: str) -> Iterator[Tiered]:
    """``load``: of what decode's tiers have, as ``--tier-load`` says it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
        pair = PrefillDecode.spawn(
            model,
            folder,
            prefill=(
                *("--tier-mode", "off", "--page-size", str(PAGE)),
                *("--max-total-tokens", "16384", "--chunked-prefill-size", "512"),
            ),
            decode=(
                *(*DEVICE, "--tp", str(num_ranks), "--tier-host-bytes", "36MiB"),
                *("--tier-dir", str(folder / "kv"), "--tier-load", load),
            ),
        )
    try:
        pair.wait_until_ready()
        tiered = Tiered(pair)
        tiered.expected = [reply.output_ids for reply in tiered.ask()]
        tiered.cold_bytes = tiered.num_handed_over()
        pair.decode.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // PAGE))
        pair.decode.flush()
        yield tiered
    finally:
        pair.kill()


RANKS = [pytest.param(1, id="one_rank"), pytest.param(2, id="two_ranks", marks=pytest.mark.long)]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_pages_on_decodes_nvme_are_not_sent(num_ranks: int, model: Path, tmp_path: Path) -> None:
    """It loads all it has: on a machine with other work, measured costs may speak against it."""
    with tiered_pair(model, tmp_path, num_ranks, "always") as tiered:
        tiered.ask_again()
        assert tiered.num_handed_over() - tiered.cold_bytes < 0.1 * tiered.cold_bytes
        loaded = tiered.decode.tier_state()["loaded_pages:nvme"] * PAGE
        assert loaded >= 0.9 * NUM_PROMPTS * aligned(LENGTH)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_disk_slower_than_prefill_delays_no_request(
    num_ranks: int, disk: Disk, model: Path, tmp_path: Path
) -> None:
    with tiered_pair(model, tmp_path, num_ranks, "measured") as tiered:
        with disk.slow(HANG_S):
            replies = tiered.ask_again()
        assert max(reply.seconds for reply in replies) < HANG_S, "a request waited for the disk"
        state = tiered.decode.tier_state()
        decided = ("load_decision_tokens:gave_up", "load_decision_tokens:declined")
        assert sum(state.get(name, 0) for name in decided) > 0


@pytest.fixture(params=["bucket", "index"])
def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The flags of a tier that both instances share."""
    if request.param == "index":
        with RedisServer() as redis:
            yield ["--tier-index", redis.url]
        return
    with ObjectServer() as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        yield ["--tier-object-url", f"s3://{server.make_bucket()}/kv"]


def test_prefill_finds_the_answer_that_decode_computed(
    sharing: list[str], model: Path, tmp_path: Path
) -> None:
    opening = make_prompts(92, 1, 700)[0]
    pair = PrefillDecode.spawn(
        model,
        tmp_path,
        *("--max-total-tokens", "8192", "--chunked-prefill-size", "512"),
        *("--tier-host-bytes", "64MiB", *sharing),
        prefill=("--tier-dir", str(tmp_path / "prefill"), "--tier-load", "always"),
        decode=("--tier-dir", str(tmp_path / "decode")),
    )
    try:
        pair.wait_until_ready()
        answer = pair.generate(opening, 400).output_ids
        turn = [*opening, *answer]
        wanted = 0.95 * len(turn)
        shared = "peer" if "--tier-index" in sharing else "object"
        until(lambda: residency(pair.prefill, turn)[shared] >= wanted)
        prefilled, decoded = pair.both([*turn, *make_prompts(93, 1, 100)[0]])
        assert decoded.status == 200, decoded.error
        found: dict[str, Any] = prefilled.body["meta_info"]
        assert found["cached_tokens"] >= wanted, found
        records = [
            server.request("/tier/costs")["ranks"][0] for server in (pair.prefill, pair.decode)
        ]
        assert [record["role"] for record in records] == ["prefill", "decode"]
        assert records[0]["bootstrap_port"] and records[1]["bootstrap_port"] is None
        assert records[0]["prefill"]["observed"] > records[1]["prefill"]["observed"]
        assert records[1]["decode"]["moments"][0] > 300, "it decoded"
        assert records[0]["tiers"][shared]["healthy"]
    finally:
        pair.kill()
