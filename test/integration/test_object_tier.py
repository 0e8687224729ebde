"""One bucket, several servers: what one computed another goes on with, and a sick bucket costs hits
and nothing else. moto's S3 server over HTTP, behind a proxy that makes faults."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from object_proxy import FaultProxy, status
from object_server import ObjectServer, s3_environment

from conftest import ALWAYS, PAGE, SMALL, aligned, ask, make_prompts
from kit.scrapes import by_rank, labels_of
from server_process import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

LENGTH, NUM_NEW = 700, 8
DEADLINE_S = 120.0
HANG_S = 9.0  # less than the bucket is given for an answer, 20 times what computing takes
MOVED = make_prompts(21, 8, LENGTH)  # opened on A, continued on B
STALLED = make_prompts(22, 2, LENGTH)  # asked for while the bucket hangs
REFUSED = make_prompts(23, 3, LENGTH)  # while it answers 503
COLD = make_prompts(24, 3, LENGTH)
RAISED = make_prompts(25, 1, LENGTH)  # brought up to the disk before it is asked for
FORGOTTEN = make_prompts(26, 1, LENGTH)
TENANT = {"extra_key": "acme", "cache_salt": "s3cret"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[ObjectServer, FaultProxy, str]]:
    with ObjectServer() as server, FaultProxy(server.address) as proxy:
        yield server, proxy, f"s3://{server.make_bucket()}/kv"


@pytest.fixture(scope="module")
def start(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., list[Server]]]:
    """Start servers side by side, each on a directory of its own."""
    folder = tmp_path_factory.mktemp("servers")
    servers: list[Server] = []

    def start(
        number: int, *arguments: str, environment: dict[str, str] | None = None
    ) -> list[Server]:
        started = []
        for _ in range(number):
            name = f"{len(servers)}"
            server = Server.spawn(
                model,
                folder / f"{name}.log",
                *("--tier-dir", str(folder / f"kv-{name}")),
                *arguments,
                environment=environment,
            )
            servers.append(server)
            started.append(server)
        for server in started:
            server.wait_until_it_generates()
        return started

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def pair(
    start: Callable[..., list[Server]], bucket: tuple[ObjectServer, FaultProxy, str]
) -> list[Server]:
    _, proxy, url = bucket
    environment = s3_environment(proxy.url)
    return start(2, *SMALL, "--tier-object-url", url, environment=environment)


def wait_for_residency(server: Server, prompt: list[int], tier: str, num_tokens: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (held := ask(server, "/tier/residency", {"input_ids": prompt})[1])[tier] < num_tokens:
        assert time.monotonic() < deadline, held
        time.sleep(0.1)


class TestLife:
    """In this order: A computes and is killed, B goes on, the bucket turns sick."""

    opened: dict[str, list[list[int]]] = {}

    def test_nothing_is_stored_under_a_bad_selector(self, pair: list[Server]) -> None:
        a, _ = pair
        for body in ({}, {"rid": "x", "text": "y"}, {"input_ids": []}, {"text": "x", "tier": "a"}):
            code, answer = ask(a, "/tier/checkpoint", body)
            assert (code, list(answer)) == (400, ["error"]), body
        assert ask(a, "/tier/checkpoint", {"rid": "nobody"})[0] == 404

    def test_checkpoint_answers_once_the_bucket_has_the_conversation(
        self, pair: list[Server]
    ) -> None:
        a, _ = pair
        opened = {"moved": MOVED, "stalled": STALLED, "refused": REFUSED, "raised": RAISED}
        for name, prompts in opened.items():
            answers = []
            for number, prompt in enumerate(prompts):
                rid = f"{name}-{number}"
                answers.append(a.generate(prompt, NUM_NEW, rid=rid).output_ids)
                selector = {"rid": rid} if number % 2 else {"input_ids": prompt}
                code, report = ask(a, "/tier/checkpoint", selector)
                assert code == 200, report
                assert report["tier"] == "object"
                assert report["num_missing"] == 0
                assert report["num_tokens"] >= aligned(LENGTH)
            self.opened[name] = answers
        report = ask(a, "/tier/residency", {"input_ids": MOVED[0]})[1]
        assert report["object"] == report["nvme"] == LENGTH // PAGE * PAGE
        state = a.tier_state()
        assert state["tier_healthy:object"] == 1
        assert state["demoted_pages"] >= (len(MOVED) + 6) * (LENGTH // PAGE)
        assert "not-a-secret" not in json.dumps(a.request("/server_info")) + a.log

    def test_checkpoint_reports_an_uncomputed_prefix_as_missing(self, pair: list[Server]) -> None:
        a, _ = pair
        code, report = ask(a, "/tier/checkpoint", {"input_ids": COLD[0]})
        assert (code, report["num_tokens"]) == (503, 0)
        assert report["num_missing"] == LENGTH // PAGE * PAGE

    def test_forgotten_on_one_server_is_gone_on_both(self, pair: list[Server]) -> None:
        """They share a bucket and no index."""
        a, b = pair
        (prompt,) = FORGOTTEN
        whole = LENGTH // PAGE * PAGE
        expected = a.generate(prompt, NUM_NEW).output_ids
        assert ask(a, "/tier/checkpoint", {"input_ids": prompt, "tier": "object"})[0] == 200
        wait_for_residency(b, prompt, "object", whole)
        assert b.generate(prompt, NUM_NEW).output_ids == expected
        wait_for_residency(b, prompt, "nvme", aligned(LENGTH))
        code, report = ask(a, "/tier/forget", {"input_ids": prompt})
        assert (code, report) == (200, {"durable": True, "num_tokens": whole})

        def tokens(server: Server) -> int:
            held = ask(server, "/tier/residency", {"input_ids": prompt})[1]
            return int(sum(held[tier] for tier in ("device", "host", "nvme", "object")))

        assert tokens(a) == 0
        deadline = time.monotonic() + DEADLINE_S
        while tokens(b):
            assert time.monotonic() < deadline, "the other server never heard of it"
            time.sleep(0.1)
        again = b.generate(prompt, NUM_NEW)
        assert (again.output_ids, again.num_cached) == (expected, 0)
        wait_for_residency(b, prompt, "nvme", aligned(LENGTH))  # stored again

    def test_conversation_resumed_elsewhere_gives_the_same_answers(
        self, pair: list[Server]
    ) -> None:
        """A is killed with -9; all that is asked of B it has never seen."""
        a, b = pair
        uninterrupted = [a.generate(prompt, 3 * NUM_NEW).output_ids for prompt in MOVED[:2]]
        a.kill()
        for prompt in (*MOVED, *STALLED, *REFUSED):
            wait_for_residency(b, prompt, "object", LENGTH // PAGE * PAGE)
        again = b.generate_all(MOVED, concurrency=2, num_new=NUM_NEW)
        assert [answer.output_ids for answer in again] == self.opened["moved"]
        assert sum(answer.cached["storage"] for answer in again) >= 0.97 * len(MOVED) * aligned(
            LENGTH
        )
        for prompt, first, whole in zip(
            MOVED[:2], self.opened["moved"], uninterrupted, strict=False
        ):
            resumed = b.generate(prompt + first, 2 * NUM_NEW)
            assert first + resumed.output_ids == whole

    def test_nvme_checkpoint_copies_pages_from_the_bucket(self, pair: list[Server]) -> None:
        _, b = pair
        (prompt,) = RAISED
        wait_for_residency(b, prompt, "object", LENGTH // PAGE * PAGE)
        assert ask(b, "/tier/residency", {"input_ids": prompt})[1]["nvme"] == 0
        code, report = ask(b, "/tier/checkpoint", {"input_ids": prompt, "tier": "nvme"})
        whole = LENGTH // PAGE * PAGE
        assert (code, report["num_tokens"], report["num_missing"]) == (200, whole, 0)
        assert ask(b, "/tier/residency", {"input_ids": prompt})[1]["nvme"] == whole
        again = b.generate(prompt, NUM_NEW)
        assert again.output_ids == self.opened["raised"][0]
        assert again.cached["storage"] == aligned(LENGTH)

    def test_pages_from_the_bucket_are_kept_on_disk(self, pair: list[Server]) -> None:
        _, b = pair
        for prompt in MOVED:
            wait_for_residency(b, prompt, "nvme", aligned(LENGTH))
        assert b.tier_state()["promoted_pages:object"] > 0

    def test_bucket_answering_503_costs_only_hits(
        self, pair: list[Server], bucket: tuple[ObjectServer, FaultProxy, str]
    ) -> None:
        _, b = pair
        _, proxy, _ = bucket
        rule = proxy.add("GET", "", status(503, "SlowDown"))
        answers = b.generate_all(REFUSED, concurrency=3, num_new=NUM_NEW)
        assert [answer.output_ids for answer in answers] == self.opened["refused"]
        assert rule.num_hit > 0
        code, report = ask(b, "/tier/checkpoint", {"input_ids": COLD[1]})
        assert (code, report["num_tokens"]) == (503, 0)
        proxy.remove(rule)
        deadline = time.monotonic() + DEADLINE_S
        while b.tier_state()["tier_healthy:object"] != 1:
            assert time.monotonic() < deadline, "it never came back"
            time.sleep(0.1)

    def test_a_bucket_that_hangs_never_stalls_the_scheduler(
        self, pair: list[Server], bucket: tuple[ObjectServer, FaultProxy, str]
    ) -> None:
        _, b = pair
        server, _, _ = bucket
        wait_for_residency(b, STALLED[0], "object", LENGTH // PAGE * PAGE)
        server.pause()
        try:
            with ThreadPoolExecutor(2) as pool:
                stalled = [pool.submit(b.generate, prompt, NUM_NEW) for prompt in STALLED]
                longest_s = 0.0
                for prompt in COLD:
                    begun = time.monotonic()
                    b.generate(prompt, NUM_NEW)
                    longest_s = max(longest_s, time.monotonic() - begun)
                assert longest_s < HANG_S, "requests that want nothing of the bucket waited for it"
                answers = [future.result(60).output_ids for future in stalled]
            assert answers == self.opened["stalled"]
        finally:
            server.resume()


@pytest.mark.slow
def test_shared_directory_serves_two_servers_with_two_ranks(
    start: Callable[..., list[Server]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of a codec; without one is what ``TestLife`` does."""
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    arguments = (
        *("--tp", "2", "--max-total-tokens", "4096", "--tier-host-bytes", "40MiB", *ALWAYS),
        *("--tier-object-url", str(tmp_path / "shared"), "--tier-codec", "zstd"),
    )
    (a,) = start(1, *arguments)
    prompts, expected = MOVED[:4], []
    for prompt in prompts:
        expected.append(a.generate(prompt, NUM_NEW, **TENANT).output_ids)
        selector = {"input_ids": prompt, **TENANT}
        code, report = ask(a, "/tier/checkpoint", selector)
        assert (code, report["num_missing"]) == (200, 0), report
    a.kill()
    (b,) = start(1, *arguments)
    for prompt in prompts:
        query = urllib.parse.urlencode({"input_ids": ",".join(map(str, prompt)), **TENANT})
        deadline = time.monotonic() + DEADLINE_S
        while ask(b, f"/tier/residency?{query}")[1]["object"] < aligned(LENGTH):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    answers = b.generate_all(prompts, concurrency=4, num_new=NUM_NEW, **TENANT)
    assert [answer.output_ids for answer in answers] == expected
    cached = sum(answer.cached["storage"] for answer in answers)
    assert cached >= 0.97 * aligned(LENGTH) * len(prompts)
    assert sum(answer.num_cached for answer in b.generate_all(prompts[:2])) == 0, "another tenant"
    assert b.request("/tier/purge", TENANT)["durable"]
    again = b.generate_all(prompts, **TENANT)
    assert sum(sum(answer.cached.values()) for answer in again) == 0
    b.kill()


@pytest.mark.slow
@pytest.mark.long
def test_measured_plans_decline_only_a_slow_bucket(
    start: Callable[..., list[Server]], bucket: tuple[ObjectServer, FaultProxy, str]
) -> None:
    """Without ``--tier-load always``: outputs never change, and a server whose bucket hangs
    answers about as fast as one that computes."""
    server, proxy, url = bucket
    arguments = ("--max-total-tokens", "4096", "--tier-host-bytes", "36MiB")
    arguments += ("--tier-object-url", url + "-measured")
    environment = s3_environment(proxy.url)
    (a,) = start(1, *arguments, environment=environment)
    prompts = make_prompts(31, 6, 3000)
    expected = []
    for prompt in prompts:
        expected.append(a.generate(prompt, NUM_NEW).output_ids)
        assert ask(a, "/tier/checkpoint", {"input_ids": prompt})[0] == 200
    a.kill()
    (b,) = start(1, *arguments, environment=environment)
    for prompt in prompts:
        wait_for_residency(b, prompt, "object", aligned(3000))
    quick = b.generate_all(prompts[:3], concurrency=1, num_new=NUM_NEW)
    assert [answer.output_ids for answer in quick] == expected[:3]
    begun = time.monotonic()
    b.generate(make_prompts(32, 1, 3000)[0], NUM_NEW)
    computed_s = time.monotonic() - begun
    server.pause()
    try:
        begun = time.monotonic()
        slow = b.generate_all(prompts[3:], concurrency=1, num_new=NUM_NEW)
        taken_s = time.monotonic() - begun
    finally:
        server.resume()
    assert [answer.output_ids for answer in slow] == expected[3:]
    assert taken_s < 3 * 4 * computed_s + 2.0, (taken_s, computed_s)
    b.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "codecs", [("fp8",), pytest.param(("int8", "fp8"), marks=pytest.mark.long)], ids="-".join
)
def test_lossy_pages_are_never_read_as_exact(
    codecs: tuple[str, ...],
    start: Callable[..., list[Server]],
    tmp_path: Path,
    record_property: pytest.RecordProperty,
) -> None:
    """One bucket: B resumes what A of its codec computed, by way of the codec; a server of another
    codec, and one that is exact, find nothing of it. What the codec changed of the greedy answers
    is recorded."""
    arguments = (*SMALL, "--tier-object-url", str(tmp_path / "shared"))
    prompts, whole = MOVED[:4], LENGTH // PAGE * PAGE
    opened = []
    (exact,) = start(1, *arguments)
    for codec in codecs:
        flags = (*arguments, "--tier-codec", codec)
        (a,) = start(1, *flags)
        answers = []
        for prompt in prompts:
            answer = a.generate(prompt, NUM_NEW)
            assert answer.num_cached == 0, "another codec's"
            answers.append(answer.output_ids)
            assert ask(a, "/tier/checkpoint", {"input_ids": prompt})[0] == 200
        stored = a.tier_state()["tier_physical_bytes:object"]
        assert 0 < stored < 0.6 * len(prompts) * whole * 3072, "no smaller than float32"
        opened.append(answers)
        a.kill()
    (b,) = start(1, *flags)
    for prompt in prompts:
        wait_for_residency(b, prompt, "object", whole)
        assert ask(exact, "/tier/residency", {"input_ids": prompt})[1]["object"] == 0
    resumed = b.generate_all(prompts, concurrency=2, num_new=NUM_NEW)
    cached = sum(answer.cached["storage"] for answer in resumed)
    assert cached >= 0.97 * len(prompts) * aligned(LENGTH)
    pairs = [
        (mine, theirs)
        for answer, expected in zip(resumed, answers, strict=True)
        for mine, theirs in zip(answer.output_ids, expected, strict=True)
    ]
    agreement = sum(mine == theirs for mine, theirs in pairs) / len(pairs)
    record_property(f"greedy_agreement_{codec}", agreement)
    print(f"{codec}: {agreement:.1%} of {len(pairs)} greedy tokens agree")
    b.kill()
    computed = exact.generate_all(prompts, concurrency=2, num_new=NUM_NEW)
    assert sum(sum(answer.cached.values()) for answer in computed) == 0
    for answers in opened:
        assert [answer.output_ids for answer in computed] == answers, "before a codec all is exact"
    exact.kill()


@pytest.mark.slow
def test_replicas_find_each_others_pages_in_the_bucket(
    start: Callable[..., list[Server]], tmp_path: Path
) -> None:
    """Data parallelism: each replica has its NVMe, both share the bucket."""
    arguments = (*SMALL, "--dp-size", "2", "--load-balance-method", "round_robin")
    arguments += ("--enable-metrics", "--extra-metric-labels", '{"site": "here"}')
    arguments += ("--tier-object-url", str(tmp_path / "shared"))
    (server,) = start(1, *arguments)
    whole = LENGTH // PAGE * PAGE
    prompts = MOVED[:4]
    expected = []
    for prompt in prompts:
        expected.append(server.generate(prompt, NUM_NEW, routed_dp_rank=0).output_ids)
        assert ask(server, "/tier/checkpoint", {"input_ids": prompt})[0] == 200
    deadline = time.monotonic() + DEADLINE_S
    while True:
        states = server.request("/server_info")["internal_states"]
        known = [state["sglang_tiered"]["tier_pages:object"] for state in states]
        if len(known) == 2 and min(known) >= len(prompts) * whole // PAGE:
            break
        assert time.monotonic() < deadline, known
        time.sleep(0.1)
    code, costs = ask(server, "/tier/costs")
    assert (code, costs["num_ranks"]) == (200, 2)
    assert [record["rank"] for record in costs["ranks"]] == [0, 1]
    first, second = costs["ranks"]
    assert first["prefill"]["observed"] >= len(prompts)
    assert second["prefill"]["observed"] < first["prefill"]["observed"], "each learns for itself"
    assert first["tiers"]["object"]["healthy"] and first["tiers"]["object"]["held_bytes"] > 0
    assert first["boot"] == second["boot"]
    answers = [server.generate(prompt, NUM_NEW, routed_dp_rank=1) for prompt in prompts]
    assert [answer.output_ids for answer in answers] == expected
    assert sum(a.cached["storage"] for a in answers) >= 0.97 * len(prompts) * aligned(LENGTH)
    server.flush()
    answers = server.generate_all(prompts, num_new=NUM_NEW)
    assert [answer.output_ids for answer in answers] == expected, "whichever replica is asked"
    assert sum(a.cached["storage"] for a in answers) >= 0.97 * len(prompts) * aligned(LENGTH)

    text = server.request("/metrics")
    healthy = by_rank(text, "tier_healthy", by="dp_rank", tier="object")
    assert healthy == {"0": 1.0, "1": 1.0}
    assert set(by_rank(text, "stored_pages_total", by="dp_rank", tier="nvme")) == {"0", "1"}
    sglangs = labels_of(text, "sglang:num_running_reqs")
    for ours in labels_of(text, "sglang_tiered_waiting_tokens"):
        assert ours.keys() >= {"model_name", "engine_type", "dp_rank", "site"}
        assert any(ours.items() <= theirs.items() for theirs in sglangs), (ours, sglangs)
    server.kill()
