"""Every kind of pair hands over what one server computes: ranks of other numbers, stages, replicas,
keys, pages received into host memory, and model families with other KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from family_models import write_latent_attention, write_sliding_window
from instances import COMMON, Instances, hands_over_what_one_server_computes

from conftest import SENT_ON_ONE_HOST
from prefill_decode import ENVIRONMENT, PrefillDecode, transfer_state
from server_process import Server
from sglang_tiered.wire.keys import make_keys

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


TWO_CONNECTIONS = ("--transfer-connections", "2")  # prefill opens them, where it sends
RANKS, REPLICAS = ("--tp", "2"), ("--dp-size", "2")
STAGES = ("--pp-size", "2", "--disable-overlap-schedule")
PAGE_64 = ("--page-size", "64")
SECURE = (*SENT_ON_ONE_HOST, "--transfer-codec", "zstd", "--transfer-encrypt", "all")
# Neighbours share an instance. Without tiers a page is one token.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # flags of prefill and of decode
    "sent_though_on_one_host": (TWO_CONNECTIONS, SENT_ON_ONE_HOST),
    "decode_of_two_ranks": (TWO_CONNECTIONS, RANKS),
    "two_ranks_each": (RANKS, RANKS),
    "prefill_of_two_ranks": (RANKS, ()),
    "two_pipeline_stages_of_prefill": (STAGES, ()),
    "two_replicas_of_prefill": (REPLICAS, ()),
    "compressed_then_encrypted": (SECURE, SECURE),
    "received_into_host_memory": (PAGE_64, HOST),
}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_those_of_one_server(
    name: str, instances: Instances, stock: Server, tmp_path: Path
) -> None:
    prefill, decode = KINDS[name]
    keys: tuple[str, ...] = ()
    if SECURE in (prefill, decode):
        make_keys(tmp_path / "keys")
        keys = ("--transfer-keys", str(tmp_path / "keys"))
    pair = instances.pair((*prefill, *keys), (*decode, *keys))
    before = transfer_state(pair.decode)
    hands_over_what_one_server_computes(pair, stock, 10_000 * (1 + list(KINDS).index(name)))
    if decode in (SENT_ON_ONE_HOST, SECURE):
        after = transfer_state(pair.decode)
        assert after["transfer_bytes:wire"] > before["transfer_bytes:wire"]
        assert after["transfer_bytes:same_host"] == before["transfer_bytes:same_host"], (
            "read from prefill's memory"
        )


FAMILIES = {
    "sliding_window_pools": write_sliding_window,
    "latent_attention": write_latent_attention,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_tokens_equal_those_of_one_server(name: str, model: Path, tmp_path: Path) -> None:
    path = FAMILIES[name](model, tmp_path / "model")
    with (
        Server.spawn(path, tmp_path / "single.log", *COMMON, environment=ENVIRONMENT) as single,
        PrefillDecode.spawn(path, tmp_path, *COMMON, "--page-size", "64") as pair,
    ):
        single.wait_until_it_generates()
        hands_over_what_one_server_computes(pair, single, 0)
