"""Every kind of pair hands over what one server computes: page sizes, tensor parallelism of other
sizes, model families, keys, and pages received into host memory."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from family_models import write_gemma3, write_latent_attention, write_sliding_window
from transfer_pair import eventually

from conftest import make_prompts
from prefill_decode import (
    ENVIRONMENT,
    PrefillDecode,
    post,
    transfer_state,
    wait_until_healthy,
)
from server_process import Server, free_port
from sglang_tiered.transfer.security import make_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (1, 2, 15, 63, 64, 65, 511, 512, 513, 1500)
COMMON = ("--max-total-tokens", "8192", "--chunked-prefill-size", "512")
OFF = ("--tier-mode", "off")
HOST = ("--tier-mode", "host", "--tier-host-bytes", "64MiB")


@dataclass(frozen=True)
class Kind:
    """Flags of both, of prefill and of decode; the model, if not the demo's."""

    both: tuple[str, ...] = ()
    prefill: tuple[str, ...] = OFF
    decode: tuple[str, ...] = OFF
    write: Callable[[Path, Path], Path] | None = None


KINDS = {
    "page_size_1": Kind(("--page-size", "1")),
    "page_size_16": Kind(("--page-size", "16")),
    "sent_though_on_one_host": Kind(("--transfer-same-host", "off", "--transfer-connections", "2")),
    "compressed": Kind(("--transfer-same-host", "off", "--transfer-codec", "zstd")),
    "decode_of_two_ranks": Kind(decode=(*OFF, "--tp", "2")),
    "prefill_of_two_ranks": Kind(prefill=(*OFF, "--tp", "2")),
    "two_ranks_each": Kind(("--tp", "2")),
    "two_pipeline_stages_of_prefill": Kind(
        ("--disable-overlap-schedule",), prefill=(*OFF, "--pp-size", "2")
    ),
    "received_into_host_memory": Kind(
        ("--page-size", "64"),
        decode=(*HOST, "--disaggregation-decode-host-receive-threshold", "0.0"),
    ),
    "sliding_window_pools": Kind(("--page-size", "64"), write=write_sliding_window),
    "gemma3": Kind(("--page-size", "64"), write=write_gemma3),
    "latent_attention": Kind(("--page-size", "64"), write=write_latent_attention),
    "keys": Kind(("--transfer-encrypt", "all")),
}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_those_of_one_server(name: str, model: Path, tmp_path: Path) -> None:
    kind = KINDS[name]
    both = kind.both
    if name == "keys":
        make_keys(tmp_path / "keys")
        both = (*both, "--transfer-keys", str(tmp_path / "keys"))
    if kind.write is not None:
        model = kind.write(model, tmp_path / "model")
    single = Server.spawn(
        model,
        tmp_path / "single.log",
        *(*OFF, *COMMON, "--nccl-port", str(free_port())),
        environment=ENVIRONMENT,
    )
    pair = PrefillDecode.spawn(
        model, tmp_path, *COMMON, *both, prefill=kind.prefill, decode=kind.decode
    )
    try:
        single.wait_until_it_generates()
        pair.wait_until_ready()
        prompts = [make_prompts(length, 1, length)[0] for length in LENGTHS]
        prompts += [prompts[-1][:700] + make_prompts(3, 1, 50)[0]]  # shares a prefix
        expected = [answer.output_ids for answer in single.generate_all(prompts)]
        got = [reply.output_ids for reply in pair.generate_all(prompts)]
        assert got == expected
        state = transfer_state(pair.decode)
        assert state["num_rooms_done"] >= len(prompts)
        assert state["num_rooms"] == 0
    finally:
        pair.kill()
        single.kill()


def test_other_page_size_fails_the_request_with_one_sentence_and_no_server(
    model: Path, tmp_path: Path
) -> None:
    """Upstream the decode server ends."""
    pair = PrefillDecode.spawn(
        model,
        tmp_path,
        *(*COMMON, *OFF),
        prefill=("--page-size", "16"),
        decode=("--page-size", "64"),
    )
    try:
        pair.wait_until_ready()
        reply = pair.generate(make_prompts(1, 1, 100)[0])
        assert reply.status != 200
        assert "age size mismatch" in reply.error
        assert pair.prefill.process.poll() is None
        assert pair.decode.process.poll() is None
    finally:
        pair.kill()


def test_killed_router_leaves_both_servers_serving(model: Path, tmp_path: Path) -> None:
    pair = PrefillDecode.spawn(model, tmp_path, *COMMON, *OFF)
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"),
        *("--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url),
    ]
    router = None
    try:
        pair.wait_until_ready()
        with (tmp_path / "router.log").open("wb") as log:
            router = subprocess.Popen(command, stdout=log, stderr=log)
        front = Server(port, router, tmp_path / "router.log")
        wait_until_healthy(front, "/readiness")  # it has found both
        prompt = make_prompts(9, 1, 1500)[0]
        expected = pair.generate(prompt).output_ids
        assert front.generate(prompt).output_ids == expected
        with ThreadPoolExecutor(4) as pool:
            bodies = [
                {"input_ids": other, "sampling_params": {"max_new_tokens": 64}}
                for other in make_prompts(10, 4, 1500)
            ]
            broken = [pool.submit(post, front, body) for body in bodies]
            eventually(lambda: transfer_state(pair.prefill)["num_rooms"] > 0)
            router.kill()
            for future in broken:
                future.result(60)
        for server in (pair.prefill, pair.decode):
            eventually(lambda server=server: transfer_state(server)["num_rooms"] == 0, 60.0)
        assert pair.generate(prompt).output_ids == expected
    finally:
        if router is not None:
            router.kill()
            router.wait(30)
        pair.kill()
