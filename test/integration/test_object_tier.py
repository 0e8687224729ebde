"""One bucket, several servers: what one computed another goes on with, and a sick bucket costs hits
and nothing else. moto's S3 server over HTTP, and directories."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from object_server import ObjectServer, s3_environment

from conftest import ALWAYS, PAGE, SMALL, Start, aligned, ask, make_prompts, residency, until
from server_process import Answer, Server
from sglang_tiered.integration.identity.tenants import tenant_digest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

LENGTH, NUM_NEW = 700, 8
WHOLE = LENGTH // PAGE * PAGE
HANG_S = 9.0  # less than the bucket is given for an answer, 20 times what computing takes
MOVED = make_prompts(21, 8, LENGTH)  # opened on A, continued on B
STALLED = make_prompts(22, 2, LENGTH)  # asked for while the bucket hangs
COLD = make_prompts(24, 3, LENGTH)
TENANT = {"extra_key": "acme", "cache_salt": "s3cret"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture(scope="module")
def pair(start: Start, bucket: ObjectServer) -> list[Server]:
    flags = (*SMALL, "--tier-object-url", f"s3://{bucket.make_bucket()}/kv")
    return start("ab", *flags, environment=s3_environment(bucket.url))


def wait_for_residency(
    server: Server, prompt: list[int], tier: str, num_tokens: int, **whose: str
) -> None:
    until(lambda: residency(server, prompt, **whose)[tier] >= num_tokens, f"not found in {tier}")


def from_storage(answers: list[Answer]) -> int:
    return sum(answer.cached["storage"] for answer in answers)


class TestLife:
    """In this order: A computes and is killed, B goes on, the bucket hangs."""

    opened: dict[str, list[list[int]]] = {}

    def test_checkpoint_answers_once_the_bucket_has_it(self, pair: list[Server]) -> None:
        a, _ = pair
        for name, prompts in (("moved", MOVED), ("stalled", STALLED)):
            self.opened[name] = []
            for number, prompt in enumerate(prompts):
                rid = f"{name}-{number}"
                self.opened[name].append(a.generate(prompt, NUM_NEW, rid=rid).output_ids)
                selector = {"rid": rid} if number % 2 else {"input_ids": prompt}
                code, report = ask(a, "/tier/checkpoint", selector)
                assert (code, report["tier"], report["num_missing"]) == (200, "object", 0), report
                assert report["num_tokens"] >= aligned(LENGTH)
        report = ask(a, "/tier/residency", {"input_ids": MOVED[0]})[1]
        assert report["object"] == report["nvme"] == WHOLE
        assert "not-a-secret" not in json.dumps(a.request("/server_info")) + a.log
        code, report = ask(a, "/tier/checkpoint", {"input_ids": COLD[0]})  # never computed
        assert (code, report["num_tokens"], report["num_missing"]) == (503, 0, WHOLE)

    def test_conversation_resumed_elsewhere_gives_the_same_answers(
        self, pair: list[Server]
    ) -> None:
        """A is killed with -9; all that is asked of B it has never seen."""
        a, b = pair
        uninterrupted = [a.generate(prompt, 3 * NUM_NEW).output_ids for prompt in MOVED[:2]]
        a.kill()
        for prompt in (*MOVED, *STALLED):
            wait_for_residency(b, prompt, "object", WHOLE)
        again = b.generate_all(MOVED, concurrency=2, num_new=NUM_NEW)
        assert [answer.output_ids for answer in again] == self.opened["moved"]
        assert from_storage(again) >= 0.97 * len(MOVED) * aligned(LENGTH)
        for prompt, first, whole in zip(
            MOVED[:2], self.opened["moved"], uninterrupted, strict=False
        ):
            resumed = b.generate(prompt + first, 2 * NUM_NEW)
            assert first + resumed.output_ids == whole
        for prompt in MOVED:
            wait_for_residency(b, prompt, "nvme", aligned(LENGTH))  # kept

    def test_a_bucket_that_hangs_never_stalls_the_scheduler(
        self, pair: list[Server], bucket: ObjectServer
    ) -> None:
        _, b = pair
        wait_for_residency(b, STALLED[0], "object", WHOLE)
        bucket.pause()
        try:
            with ThreadPoolExecutor(2) as pool:
                stalled = [pool.submit(b.generate, prompt, NUM_NEW) for prompt in STALLED]
                for prompt in COLD:
                    begun = time.monotonic()
                    b.generate(prompt, NUM_NEW)
                    assert time.monotonic() - begun < HANG_S, "it wants nothing of the bucket"
                answers = [future.result(60).output_ids for future in stalled]
            assert answers == self.opened["stalled"]
        finally:
            bucket.resume()


@pytest.mark.slow
def test_shared_directory_serves_two_servers_with_two_ranks(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of a codec; without one is what ``TestLife`` does."""
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    arguments = (
        *("--tp", "2", "--max-total-tokens", "4096", "--tier-host-bytes", "40MiB", *ALWAYS),
        *("--tier-object-url", str(tmp_path / "shared"), "--tier-codec", "zstd"),
    )
    (a,) = start("c", *arguments)
    prompts, expected = MOVED[:4], []
    for prompt in prompts:
        expected.append(a.generate(prompt, NUM_NEW, **TENANT).output_ids)
        code, report = ask(a, "/tier/checkpoint", {"input_ids": prompt, **TENANT})
        assert (code, report["num_missing"]) == (200, 0), report
    a.kill()
    (b,) = start("d", *arguments)
    wait_for_residency(b, prompts[-1], "object", aligned(LENGTH), **TENANT)
    answers = b.generate_all(prompts, concurrency=4, num_new=NUM_NEW, **TENANT)
    assert [answer.output_ids for answer in answers] == expected
    assert from_storage(answers) >= 0.97 * aligned(LENGTH) * len(prompts)
    assert sum(answer.num_cached for answer in b.generate_all(prompts[:2])) == 0, "another tenant"
    counted = ask(b, "/tier/tenants")[1][0]
    digest = tenant_digest(**TENANT).hex()
    assert [row["num_pages"] for row in counted if row["tenant"] == digest][0] >= 4 * WHOLE // PAGE
    assert TENANT["cache_salt"] not in json.dumps(counted)
    b.kill()


@pytest.mark.slow
def test_replicas_find_each_others_pages_in_the_bucket(start: Start, tmp_path: Path) -> None:
    """Data parallelism: each replica has its NVMe, both share the bucket."""
    (server,) = start(
        "e",
        *(*SMALL, "--dp-size", "2", "--load-balance-method", "round_robin"),
        *("--tier-object-url", str(tmp_path / "shared")),
    )
    prompts = MOVED[:4]
    expected = []
    for prompt in prompts:
        expected.append(server.generate(prompt, NUM_NEW, routed_dp_rank=0).output_ids)
        assert ask(server, "/tier/checkpoint", {"input_ids": prompt})[0] == 200

    def all_know() -> bool:
        states = server.request("/server_info")["internal_states"]
        known = [state["sglang_tiered"]["tier_pages:object"] for state in states]
        return len(known) == 2 and min(known) >= len(prompts) * WHOLE // PAGE

    until(all_know, "a replica does not know of the other's")
    first, second = ask(server, "/tier/costs")[1]["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert second["prefill"]["observed"] < first["prefill"]["observed"], "each learns for itself"
    for rank in ({"routed_dp_rank": 1}, {}):
        answers = server.generate_all(prompts, num_new=NUM_NEW, **rank)
        assert [answer.output_ids for answer in answers] == expected
        assert from_storage(answers) >= 0.97 * len(prompts) * aligned(LENGTH)
        server.flush()
