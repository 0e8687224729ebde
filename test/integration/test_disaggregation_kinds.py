"""Every kind of pair hands over what one server computes: page sizes, tensor parallelism of other
sizes, keys, and pages received into host memory."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from instances import Instances, hands_over_what_one_server_computes
from route_front import Front

from conftest import SENT_ON_ONE_HOST, ask, make_prompts
from kit.waiting import eventually
from prefill_decode import post, transfer_state, wait_until_healthy
from server_process import Server, free_ports
from sglang_tiered.wire.keys import make_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from prefill_decode import PrefillDecode

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

HOST = (
    *("--tier-mode", "host", "--tier-host-bytes", "64MiB", "--page-size", "64"),
    *("--disaggregation-decode-host-receive-threshold", "0.0"),
)


@pytest.fixture(scope="module")
def instances(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instances]:
    instances = Instances(model, tmp_path_factory.mktemp("instances"))
    yield instances
    instances.kill()


@dataclass(frozen=True)
class Kind:
    """Flags of prefill and of decode."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


TWO_CONNECTIONS = ("--transfer-connections", "2")  # prefill opens them, where it sends
RANKS, REPLICAS = ("--tp", "2"), ("--dp-size", "2")
STAGES = ("--pp-size", "2", "--disable-overlap-schedule")
PAGE_16, PAGE_64 = ("--page-size", "16"), ("--page-size", "64")
SECURE = (*SENT_ON_ONE_HOST, "--transfer-codec", "zstd", "--transfer-encrypt", "all")
# Neighbours share an instance, and so do the tests below. Without tiers a page is one token.
KINDS = {
    "sent_though_on_one_host": Kind(TWO_CONNECTIONS, SENT_ON_ONE_HOST),
    "decode_of_two_ranks": Kind(TWO_CONNECTIONS, RANKS),
    "two_ranks_each": Kind(RANKS, RANKS),
    "prefill_of_two_ranks": Kind(RANKS),
    "two_pipeline_stages_of_prefill": Kind(STAGES),
    "two_replicas_of_prefill": Kind(REPLICAS),
    "compressed_then_encrypted": Kind(SECURE, SECURE),
    "received_into_host_memory": Kind(PAGE_64, HOST),
    "page_size_16": Kind(PAGE_16, PAGE_16),
}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_those_of_one_server(
    name: str, instances: Instances, stock: Server, tmp_path: Path
) -> None:
    kind = KINDS[name]
    keys: tuple[str, ...] = ()
    if SECURE in (kind.prefill, kind.decode):
        make_keys(tmp_path / "keys")
        keys = ("--transfer-keys", str(tmp_path / "keys"))
    pair = instances.pair((*kind.prefill, *keys), (*kind.decode, *keys))
    before = transfer_state(pair.decode)
    hands_over_what_one_server_computes(pair, stock, 10_000 * (1 + list(KINDS).index(name)))
    if kind.decode in (SENT_ON_ONE_HOST, SECURE):
        after = transfer_state(pair.decode)
        assert after["transfer_bytes:wire"] > before["transfer_bytes:wire"]
        assert after["transfer_bytes:same_host"] == before["transfer_bytes:same_host"], (
            "read from prefill's memory"
        )


def test_other_page_size_fails_only_the_request(
    instances: Instances,
) -> None:
    """Upstream the decode server ends."""
    pair = instances.pair(PAGE_16, HOST)
    told = len(pair.decode.log)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.generate, make_prompts(1, 1, 100)[0], rid="of-other-pages")
        eventually(lambda: "age size mismatch" in pair.decode.log[told:])
        # Prefill does not hear of it, and would wait for a minute before it gave up.
        pair.prefill.request("/abort_request", {"rid": "of-other-pages"})
        reply = asked.result()
    assert reply.status != 200
    assert "age size mismatch" in reply.error
    assert pair.prefill.process.poll() is None
    assert pair.decode.process.poll() is None


@contextmanager
def front_of(pair: PrefillDecode, folder: Path) -> Iterator[Front]:
    folder.mkdir(exist_ok=True)
    urls = [pair.prefill.url, pair.decode.url]
    front = Front.start(folder, urls, "--pick-timeout", "2s")
    try:
        front.wait_until_ready(2)
        yield front
    finally:
        front.close()


@contextmanager
def router_of(pair: PrefillDecode, folder: Path) -> Iterator[Server]:
    """SGLang's own."""
    port = free_ports(2)  # for its metrics too, or they have one that all routers want
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"),
        *("--prometheus-port", str(port + 1)),
        *("--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url),
    ]
    log = folder / "router.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        router = Server(port, process, log)
        wait_until_healthy(router, "/readiness")  # it has found both
        yield router
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.parametrize("before", [front_of, router_of])
def test_samples_through_a_front_keep_it_working(
    instances: Instances,
    stock: Server,
    tmp_path: Path,
    before: Callable[[PrefillDecode, Path], AbstractContextManager[Front | Server]],
) -> None:
    """One client's ``n`` was 500 after 500, and then every client's request 503. The halves tell no
    costs here."""
    pair = instances.pair(PAGE_16, PAGE_16)
    text = "a prompt of some length, so that it fills pages " * 3
    with before(pair, tmp_path) as made:
        front = Server(made.port, made.process, tmp_path / "log")
        for num_samples in (1, 2, 4) * 2:  # ten that failed opened the router's circuit
            asked = {"model": "m", "n": num_samples, "max_tokens": 6, "temperature": 0}
            message = {"role": "user", "content": f"{num_samples} {text}"}
            tokens = [[num_samples] * 40, [65] * 70]
            sampling = {"temperature": 0, "max_new_tokens": 6, "n": num_samples}
            bodies = [
                ("/v1/chat/completions", {**asked, "messages": [message]}),
                ("/v1/completions", {**asked, "prompt": text}),
                ("/v1/completions", {**asked, "prompt": [text, text[5:], text[9:]]}),
                ("/generate", {"text": text, "sampling_params": sampling}),
                ("/generate", {"input_ids": tokens, "sampling_params": sampling}),
            ]
            if before is front_of:
                bodies += [
                    ("/generate", {"text": [text, text[5:]], "sampling_params": sampling}),
                    ("/v1/completions", {**asked, "prompt": tokens}),
                ]
            for path, body in bodies:
                status, answer = ask(front, path, body)
                assert status == 200, (path, num_samples, answer)
                assert choices_of(answer) == choices_of(ask(stock, path, body)[1])
            assert ask(front, "/generate", {"text": "plain"})[0] == 200
        for server in (pair.prefill, pair.decode):
            eventually(lambda server=server: transfer_state(server)["transfer_rooms"] == 0)


def choices_of(answer: Any) -> list[str]:
    """The texts of an answer of ``/generate`` or of OpenAI's calls, in order."""
    if isinstance(answer, dict) and "choices" in answer:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [one["text"] if "text" in one else one["message"]["content"] for one in choices]
    return [one["text"] for one in (answer if isinstance(answer, list) else [answer])]


def test_killed_front_leaves_both_servers_serving(instances: Instances, tmp_path: Path) -> None:
    pair = instances.pair(PAGE_16, PAGE_16)
    with front_of(pair, tmp_path) as made:
        front = Server(made.port, made.process, made.log_path)
        prompt = make_prompts(9, 1, 1500)[0]
        expected = pair.generate(prompt).output_ids
        assert front.generate(prompt).output_ids == expected
        with ThreadPoolExecutor(4) as pool:
            bodies = [
                {"input_ids": other, "sampling_params": {"max_new_tokens": 64}}
                for other in make_prompts(10, 4, 1500)
            ]
            broken = [pool.submit(post, front, body) for body in bodies]
            eventually(lambda: transfer_state(pair.prefill)["transfer_rooms"] > 0)
            front.process.kill()
            for future in broken:
                future.result(60)
        for server in (pair.prefill, pair.decode):
            eventually(
                lambda server=server: transfer_state(server)["transfer_rooms"] == 0, timeout_s=60.0
            )
        assert pair.generate(prompt).output_ids == expected
