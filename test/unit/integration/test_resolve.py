"""Bad flags get one sentence before anything is touched; good ones come to SGLang's arguments."""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server_process import free_ports
from sglang_tiered import launch_server
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode, TransferConfig
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import GiB, MiB, flags_of
from sglang_tiered.integration import resolve as server_args
from sglang_tiered.integration.platforms.memory import allocatable_bytes
from sglang_tiered.integration.resolve import (
    URL_VARIABLE,
    added_arguments,
    resolve_object,
    resolve_peers,
    resolve_transfer,
    warnings,
)
from sglang_tiered.integration.storage import shards, tiers
from sglang_tiered.integration.storage.tiers import peer_settings
from sglang_tiered.remote_config import ObjectConfig, PeerConfig
from sglang_tiered.storage.filesystem import filesystem_type
from sglang_tiered.wire.keys import PEER, make_keys

URL, LOCAL_URL = "redis://192.0.2.1:6379/0", "redis://127.0.0.1:6379/0"
DECODE = "--tier-mode host --disaggregation-mode decode"


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return launch_server.make_parser()


@pytest.fixture
def resolve(parser: argparse.ArgumentParser, tmp_path: Path) -> Any:
    def resolve(line: str, *, on_cpu: bool = True) -> server_args.Resolved:
        words = ["--model-path", "m", *line.format(tmp=tmp_path).split()]
        explicit = server_args.explicit_arguments(parser, words)
        return server_args.resolve(explicit, words, on_cpu=on_cpu)

    return resolve


def option(resolved: server_args.Resolved, flag: str) -> str:
    return resolved.sglang_arguments[resolved.sglang_arguments.index(flag) + 1]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_tiering_is_on_by_default_and_capped(resolve: Any, on_cpu: bool) -> None:
    resolved = resolve("--tier-dir {tmp}/kv", on_cpu=on_cpu)
    assert resolved.config.mode is TierMode.NVME and resolved.config.object is None
    assert 0 < resolved.config.nvme.capacity_bytes <= 256 * GiB
    assert option(resolved, "--radix-cache-backend") == "tiered"
    assert option(resolved, "--page-size") == "64"
    assert "--enable-hierarchical-cache" in resolved.sglang_arguments
    extra = json.loads(option(resolved, "--hicache-storage-backend-extra-config"))
    assert extra["class_name"] == "TieredStorage" and extra["prefetch_threshold"] == 64


def test_mode_off_is_stock_sglang(resolve: Any) -> None:
    resolved = resolve("--tier-mode off --page-size 1")
    # On a CPU an idle server does not take a core from those that compute.
    expected = ["--model-path", "m", "--page-size", "1", "--sleep-on-idle"]
    assert resolved.sglang_arguments == expected


def test_what_the_user_says_wins(resolve: Any) -> None:
    resolved = resolve("--tier-dir {tmp}/kv --page-size=32 --hicache-mem-layout layer_first")
    arguments = resolved.sglang_arguments
    assert "--page-size=32" in arguments and "--page-size" not in arguments
    assert arguments.count("--hicache-mem-layout") == 1
    extra = json.loads(option(resolved, "--hicache-storage-backend-extra-config"))
    assert extra["prefetch_threshold"] == 32


def test_abbreviated_tier_flags_reach_no_sglang(resolve: Any) -> None:
    """Its parser answered with its usage."""
    resolved = resolve("--tier-di {tmp}/kv --tier-nvme-by=1GiB --tp 2")
    assert resolved.config.nvme.capacity_bytes == GiB
    assert option(resolved, "--tp") == "2"
    assert not [word for word in resolved.sglang_arguments if word.startswith("--tier")]


def test_ranks_of_one_machine_share_the_caps(resolve: Any) -> None:
    line = "--tier-dir {tmp}/kv --tp 2 --dp-size 2 --tier-nvme-bytes 1GiB"
    line += " --tier-nvme-writes-per-day=500GiB --tier-object-url {tmp}/shared"
    config = resolve(line + " --tier-object-requests-per-day 1000").config
    assert (config.num_ranks, config.nvme_bytes_per_rank) == (4, 256 * MiB)
    assert config.nvme_writes_per_day_per_rank == 125 * GiB
    assert config.object.capacity_bytes == 1 << 40, "by default"
    of_rank = config.object_of_rank
    assert (of_rank.capacity_bytes, of_rank.requests_per_day) == (1 << 38, 250)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--tier-host-bytes 0", "--tier-host-bytes 0 must be greater"),
        ("--tier-host-bytes 9000TiB", "of memory that can be allocated here"),
        ("--tier-nvme-bytes 1MiB", "--tier-nvme-bytes 1MiB is too small"),
        ("--tier-nvme-bytes 64MiB --tier-nvme-region-bytes 64MiB", "must hold 2 regions of 64MiB"),
        ("--tier-nvme-region-bytes 5000000", "5000000 must be a multiple of 4096"),
        ("--tier-nvme-writes-per-day 0", "greater than zero; drop it to write without a limit"),
        ("--tier-nvme-bytes 1GiB --tier-nvme-writes-per-day 1MiB", "allow 10 regions of 128MiB"),
        ("--disable-radix-cache", "--disable-radix-cache cannot run with tiering"),
        ("--enable-lmcache", "--enable-lmcache cannot run with tiering"),
        ("--enable-flexkv", "--enable-flexkv cannot run with tiering"),
        ("--radix-cache-backend flexkv", "--radix-cache-backend cannot run with tiering"),
        ("--enable-unified-cache-external-linker", "-external-linker cannot run with tiering"),
        ("--hicache-storage-prefetch-retry-max-attempts 0", "max-attempts must be at least 1, or"),
        ("--disaggregation-decode-enable-offload-kvcache", "cannot run with tiering; drop"),
        ("--hicache-storage-backend file", "--hicache-storage-backend cannot run with tiering"),
        ("--hicache-host-memory-mode buffer_only", "buffer_only leaves no host tier"),
        ("--tier-host-bytes 1GiB --hicache-ratio 2", "both size the host tier"),
        ("--dcp-size 2", "--dcp-size 2 splits pages over ranks"),
        ("--enable-kv-cache-sharding", "--enable-kv-cache-sharding cannot run with tiering"),
        ("--elastic-ep-backend mooncake", "--elastic-ep-backend cannot run with tiering; drop it"),
        ("--tier-object-url bucket", "--tier-object-url bucket is not a place for objects"),
        ("--tier-object-url s3://me:pw@b/p", "carries credentials or options"),
        ("--tier-object-ttl 7d", "--tier-object-ttl 7d needs --tier-object-url"),
        ("--tier-mode host --tier-index redis://h", "--tier-index URL has no meaning with"),
        ("--decode-attention-backend pod --tier-mode off", "would never see a mixed batch"),
        ("--tier-mode off --tier-log-requests /log", "/log has no meaning with --tier-mode off"),
        # ---- Sharing between servers: never a password ----
        ("--tier-peer-port 4000", "--tier-peer-port 4000 needs --tier-peers or --tier-index"),
        ("--tier-index http://:hunter2@host", "cannot be used; write redis://"),
        ("--tier-index redis://:hun/ter2@host", "--tier-index"),
        ("--tier-index redis://:hunter2@host?maint_notifications_config=1", "--tier-index"),
        (f"--tier-index {URL} --tier-peer-port 0", "0 is not a whole number from 1 on"),
        (f"--tier-index {URL} --tier-peer-port 65535 --tp 2", "must be at most 65534"),
        (f"--tier-index {URL} --tier-peer-host 192.0.2.1", "cannot be listened on"),
        (f"--tier-index {URL} --tier-peer-host no_such_host", "is no host that this machine"),
        (f"--tier-index {URL} --pp-size 2", "--tier-index cannot run with --pp-size 2"),
        (f"--tier-index {URL} --tier-peer-keys /nowhere", "/nowhere has no peer.key_secret"),
        ("--tier-peers host", "--tier-peers 'host' is no address; write HOST:PORT"),
        ("--tier-peers ,", "--tier-peers names no server"),
        ("--tier-peers a:1,b:2", "--tier-peers names servers of several ports"),
        ("--tier-peers a:1 --pp-size 2", "--tier-peers cannot run with --pp-size 2"),
        # ---- Prefill and decode ----
        ("--transfer-codec int8", "is for --disaggregation-mode prefill or decode with"),
        (f"{DECODE} --transfer-encrypt some", "--transfer-encrypt some is unknown"),
        (f"{DECODE} --transfer-window-bytes 0", "transfer-window-bytes 0 must be greater than"),
        (f"{DECODE} --transfer-connections 0", "0 is not a whole number from 1"),
        (f"{DECODE} --transfer-connections 17", "--transfer-connections 17 must be from 1 to 16"),
        (f"{DECODE} --transfer-codec gzip", "--transfer-codec gzip is unknown; choose one of none"),
        (f"{DECODE} --transfer-peer-timeout 1", "transfer-peer-timeout 1 must be from 2"),
        (f"{DECODE} --transfer-peer-timeout nan", "transfer-peer-timeout nan is not a time"),
        (f"{DECODE} --transfer-encrypt all", "needs --transfer-keys"),
        (f"{DECODE} --transfer-keys /nowhere", "/nowhere has no decode.key_secret"),
        (f"{DECODE} --tokenizer-worker-num 2", "2 cannot run with the zmq"),
        (f"{DECODE} --transfer-codec int8 --disaggregation-enable-kv-checksum", "int8 rounds what"),
    ],
)
def test_bad_combination_is_one_sentence(
    resolve: Any, line: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(line)
    message = str(caught.value)
    assert sentence in message and message.endswith(".") and "\n" not in message
    assert "hun" not in message and "ter2" not in message
    assert list(tmp_path.iterdir()) == []


def test_more_regions_than_open_files_are_refused(
    resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_args, "max_regions", lambda: 10)
    line = "--tier-dir {tmp}/kv --tier-nvme-bytes 64MiB"
    with pytest.raises(ConfigError, match=r"4MiB makes 16 files of each rank's 64MiB.* for 10;"):
        resolve(line + " --tier-nvme-region-bytes 4MiB")
    assert resolve(line).config.nvme.region_bytes == 8 * MiB


@pytest.fixture
def in_memory() -> Path:
    shm = Path("/dev/shm")
    if not shm.is_dir() or filesystem_type(shm) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    return shm / "no-such-store"


def test_a_tier_in_memory_counts_as_memory(resolve: Any, in_memory: Path) -> None:
    nvme = resolve(f"--tier-dir {in_memory}").config.nvme
    there = allocatable_bytes()
    assert nvme.memory_bytes == nvme.capacity_bytes < there / 2
    resolved = resolve(f"--tier-dir {in_memory} --tier-nvme-bytes 1GiB")
    assert resolved.config.nvme.memory_bytes == GiB
    assert "is on tmpfs, which is memory: the NVMe tier may take 1GiB of it" in resolved.notes[0]
    for beyond in ("900TiB", f"{there // MiB - 256}MiB --tier-host-bytes 1GiB"):
        with pytest.raises(ConfigError, match=r"of memory that .* can take, which is on tmpfs"):
            resolve(f"--tier-dir {in_memory} --tier-nvme-bytes {beyond}")
    assert not in_memory.exists()


def test_every_flag_without_its_tier_is_refused(resolve: Any) -> None:
    for flag in (*flags_of(NvmeConfig), *flags_of(ObjectConfig), *flags_of(PeerConfig)):
        with pytest.raises(ConfigError, match="no meaning with --tier-mode host; drop one"):
            resolve(f"--tier-mode host {flag.option} x")


@pytest.mark.parametrize(
    ("codec", "lossy"), [("none", None), ("zstd", None), ("fp8", "fp8"), ("int8", "int8")]
)
def test_a_lossy_codec_is_part_of_the_namespace(
    resolve: Any, codec: str, lossy: str | None
) -> None:
    line = f"--tier-dir {{tmp}}/kv --tier-codec {codec}"
    assert tiers.lossy_codec(resolve(line).config) == lossy


ALGORITHM, KEY = "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({ALGORITHM: "rot13"}, f"{ALGORITHM}=rot13 is unknown; set it to one of AES256"),
        ({KEY: "a-key"}, f"{KEY} needs {ALGORITHM}=aws:kms beside it"),
        ({ALGORITHM: "AES256", KEY: "a-key"}, f"{KEY} needs {ALGORITHM}=aws:kms beside it"),
    ],
)
def test_encryption_that_would_be_ignored_is_refused(
    environment: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=sentence):
        resolve_object({"tier_object_url": "s3://bucket/kv"})


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("--tp 4 --dp-size 2", (8, 4, 1, 2)),
        ("--tp 4 --dp-size 2 --enable-dp-attention", (4, 2, 2, 2)),
        ("--tp 4 --attn-dp-size 2 --enable-dp-attention", (4, 2, 2, 2)),
        ("--tp 8 --attn-dp-size 2 --attn-cp-size 2 --nnodes 2", (4, 2, 2, 2)),
        ("--tp 2 --pp-size 2", (4, 2, 1, 1)),
    ],
)
def test_shards_of_own_replicas_outlive_restarts(
    resolve: Any, line: str, sizes: tuple[int, ...]
) -> None:
    """Shards of other sizes are removed at a start."""
    log = "" if "pp" in line else " --tier-log-requests {tmp}/log"
    config = resolve(f"--tier-dir {{tmp}}/kv {line}{log}").config
    num_replicas = config.request_log.num_replicas if log else 1
    assert (config.num_ranks, config.tp_size, config.dp_size, num_replicas) == sizes


def test_sizes_are_those_of_the_resolved_settings(resolve: Any) -> None:
    """A model may turn replicas into groups of DP attention."""
    config = resolve("--tier-dir {tmp}/kv --tp 4 --dp-size 2").config
    model = {"tp_size": 4, "pp_size": 1, "dp_size": 1, "attn_dp_size": 2, "attn_cp_size": 2}
    config = shards.of_settings(SimpleNamespace(**model, nnodes=1)).put_into(config)
    assert (config.num_ranks, config.tp_size, config.dp_size) == (4, 1, 2)


# ---- Sharing between servers ----


def peers_of(
    *, num_ranks: int = 1, environment: dict[str, str] | None = None, **explicit: Any
) -> PeerConfig | None:
    return resolve_peers(explicit, num_ranks, environment or {})


# Of this machine, and nobody else's: ports next to each other are free or taken as a test says.
QUIET_HOST = "127.77.0.1"


@pytest.fixture
def taken() -> Any:
    with socket.create_server((QUIET_HOST, 0)) as server:
        yield server.getsockname()[1]


def test_the_flag_wins_over_the_environment() -> None:
    other = {URL_VARIABLE: "redis://:pw@192.0.2.2"}
    assert peers_of() is peers_of(environment={URL_VARIABLE: ""}) is None
    assert peers_of(tier_index=URL, environment=other).url == URL
    assert peers_of(environment=other).url == "redis://:pw@192.0.2.2"


def test_pages_are_served_where_the_server_listens() -> None:
    for host, peer_host, expected in (
        ({}, {}, "127.0.0.1"),
        ({"host": "0.0.0.0"}, {}, "0.0.0.0"),
        ({"host": "0.0.0.0"}, {"tier_peer_host": "localhost"}, "127.0.0.1"),
    ):
        assert peers_of(tier_index=URL, **host, **peer_host).host == expected


def test_each_rank_has_a_port_of_its_own(taken: int) -> None:
    port = free_ports(2)
    own = {"tier_index": URL, "tier_peer_host": QUIET_HOST, "num_ranks": 2}
    config = peers_of(**own, tier_peer_port=str(port))
    assert [peer_settings(config, rank).listen_port for rank in range(2)] == [port, port + 1]
    with pytest.raises(ConfigError, match=f"--tier-peer-port {taken} is in use on {QUIET_HOST}"):
        peers_of(**own, tier_peer_port=str(taken - 1))


def test_a_rank_follows_those_with_its_pages() -> None:
    """Of two servers with two replicas of two ranks each, and where names do not resolve yet."""
    config = peers_of(tier_peers="a.invalid:31000,b.invalid:31000", num_ranks=4, host="127.0.0.1")
    assert config is not None and config.port == 31000
    for rank, ports in enumerate([(0, 2), (1, 3), (0, 2), (1, 3)]):
        settings = peer_settings(config, rank, num_ranks=4, tp_size=2)
        assert settings.ports == ports
        assert settings.listen_port == 31000 + rank
        assert [target.host for target in settings.peers] == ["a.invalid", "b.invalid"]


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    make_keys(tmp_path, (PEER,))
    config = peers_of(tier_index=URL, tier_peer_keys=str(tmp_path))
    assert peer_settings(config, 0).keys_directory == str(tmp_path)
    os.chmod(tmp_path / "peer.key_secret", 0o644)
    with pytest.raises(ConfigError, match="can be read by others; chmod 600 it"):
        peers_of(tier_index=URL, tier_peer_keys=str(tmp_path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"--tier-index {URL} --host 0.0.0.0", "--tier-peer-keys"),
        (f"--tier-index {URL}", "anyone who can write to the Redis"),
        ("--tier-peers 192.0.2.5:31000 --host 0.0.0.0", "erase"),
        (f"--tier-index {LOCAL_URL} --host localhost", ""),
        ("--tier-peers 192.0.2.5:31000", ""),
    ],
)
def test_sharing_beyond_this_machine_is_noted(
    resolve: Any, line: str, said: str, tmp_path: Path
) -> None:
    make_keys(tmp_path, (PEER,))
    line = f"--tier-dir {{tmp}}/kv --tier-nvme-bytes 1GiB {line}"
    notes = resolve(line).notes
    assert len(notes) == bool(said) and said in "".join(notes)
    assert resolve(f"{line} --tier-peer-keys {{tmp}}").notes == ()


# ---- Prefill and decode ----


def added(explicit: dict[str, Any], *, mode: TierMode = TierMode.HOST) -> dict[str, str | None]:
    config = TieredConfig(mode=mode, transfer=resolve_transfer(explicit))
    return added_arguments(explicit, config, on_cpu=False)


def test_zmq_is_the_default_and_decode_uses_tiers() -> None:
    assert resolve_transfer({}) is None
    assert added({}, mode=TierMode.OFF) == {}
    for role in ("prefill", "decode"):
        explicit = {"disaggregation_mode": role}
        assert resolve_transfer(explicit) == TransferConfig()
        flags = added(explicit)
        assert flags["--disaggregation-transfer-backend"] == "zmq"
        assert ("--disaggregation-decode-enable-radix-cache" in flags) == (role == "decode")
        stock = added(explicit, mode=TierMode.OFF)
        assert "--disaggregation-decode-enable-radix-cache" not in stock


def test_every_value_reaches_the_settings(resolve: Any, tmp_path: Path) -> None:
    make_keys(tmp_path)
    line = f"{DECODE} --transfer-keys {{tmp}} --transfer-encrypt all --transfer-same-host off"
    line += " --transfer-window-bytes 8MiB --transfer-connections 3 --transfer-codec int8"
    config = resolve(f"{line} --transfer-peer-timeout 2.5").config.transfer
    keys = {"keys_directory": str(tmp_path), "encrypt_data": True}
    sizes = {"window_bytes": 8 * MiB, "num_connections": 3, "peer_timeout_s": 2.5}
    assert config == TransferConfig(same_host=False, codec="int8", **keys, **sizes)


def test_server_of_both_roles_needs_both_keys(tmp_path: Path) -> None:
    """Keys that are missing at the switch leave a server without a role."""
    switches = {"enable_pd_role_switch": True, "transfer_keys": str(tmp_path)}
    make_keys(tmp_path)
    for role in ("prefill", "decode"):
        explicit = {"disaggregation_mode": role, **switches}
        assert "--disaggregation-decode-enable-radix-cache" in added(explicit), "later"
    (tmp_path / "prefill.key_secret").unlink()
    with pytest.raises(ConfigError, match="has no prefill.key_secret"):
        resolve_transfer({"disaggregation_mode": "decode", **switches})


def test_who_may_decode_alone_is_noted() -> None:
    """Prefill needs no ``--transfer-allow``, until it decodes and fails all."""
    given = {"disaggregation_mode": "prefill", "enable_pd_role_switch": True, "host": "0.0.0.0"}

    def warned(**more: Any) -> list[str]:
        explicit = {**given, **more}
        config = TieredConfig(mode=TierMode.OFF, transfer=resolve_transfer(explicit))
        return [*warnings(explicit, config, on_cpu=False)]

    assert "--transfer-allow" in warned()[0]
    for more in ({"host": "::1"}, {"enable_pd_role_switch": False}, {"transfer_allow": "::/0"}):
        assert not warned(**more)
