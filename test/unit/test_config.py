"""Settings that cannot work together, and their trip through the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_tiered.config import (
    ENVIRONMENT_VARIABLE,
    NvmeConfig,
    TieredConfig,
    TierMode,
    default_region_bytes,
)
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import GiB, MiB, values_of
from sglang_tiered.remote_config import ObjectConfig, PeerConfig


def nvme(**changes: object) -> NvmeConfig:
    settings: dict[str, object] = {"capacity_bytes": GiB, "region_bytes": 64 * MiB}
    return NvmeConfig(directory="d", **{**settings, **changes})  # type: ignore[arg-type]


def bucket(url: str = "s3://b/p", **settings: object) -> ObjectConfig:
    return ObjectConfig(url=url, **settings)  # type: ignore[arg-type]


def make_config(**changes: object) -> TieredConfig:
    settings: dict[str, object] = {"mode": TierMode.NVME, "host_bytes": GiB, "nvme": nvme()}
    return TieredConfig(**{**settings, **changes})  # type: ignore[arg-type]


INDEX = PeerConfig(servers="a:1", url="redis://me:pass@word@192.0.2.1:6379/2", port=4000)
DAILY_BUCKET = bucket(capacity_bytes=GiB, ttl_s=86400.0, writes_per_day=GiB, requests_per_day=1000)


@pytest.mark.parametrize(
    "changes", [{"nvme": nvme(writes_per_day=GiB * 500)}, {"peers": INDEX, "object": DAILY_BUCKET}]
)
def test_config_survives_the_environment(changes: dict[str, object]) -> None:
    environment: dict[str, str] = {}
    assert TieredConfig.from_environment(environment) is None
    config = make_config(**changes)
    config.to_environment(environment)
    assert TieredConfig.from_environment(environment) == config


def test_settings_of_peers_hide_the_password() -> None:
    assert INDEX.shown_url == "redis://192.0.2.1:6379/2"
    config = make_config(peers=INDEX)
    assert "word" not in f"{config!r} {config} {INDEX!r} {[INDEX]}"


DAILY, SHARED = nvme(writes_per_day=1280 * MiB), nvme(tenant_share=0.25)


def test_budgets_are_of_each_rank() -> None:
    make_config(num_ranks=8)
    assert make_config(nvme=DAILY, num_ranks=2).nvme_writes_per_day_per_rank == 640 * MiB
    assert make_config(nvme=SHARED, num_ranks=2).max_tenant_bytes_per_rank == 128 * MiB
    config = make_config()
    assert config.nvme_writes_per_day_per_rank is config.max_tenant_bytes_per_rank is None


BAD_URLS = (
    *("", "bucket", "s3://", "http://127.0.0.1/b", "s4://b", "s3://[bad", "s3://b]"),
    *("s3:///prefix", "s3://bucket?key=secret", "s3://bucket#secret", "file:" + "//localhost"),
    Path("/path").as_uri().replace("///", "//host/"),
    "s3://" + "key:secret" + "@bucket",
)
IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: make_config(num_ranks=9), "--tier-nvme-bytes 1GiB is too small.*9 ranks"),
    (lambda: make_config(nvme=DAILY, num_ranks=3), "--tier-nvme-writes-per-day 1.25GiB .*3 ranks"),
    (lambda: make_config(nvme=SHARED, num_ranks=3), "--tier-tenant-share 25.*3 ranks"),
    (lambda: nvme(region_bytes=4 * MiB + 1), "tier-nvme-region-bytes"),
    (lambda: nvme(region_bytes=0), "tier-nvme-region-bytes"),
    *(
        (lambda url=url: values_of(ObjectConfig, {"tier_object_url": url}), "--tier-object-url")
        for url in BAD_URLS
    ),
]


@pytest.mark.parametrize(("make", "sentence"), IMPOSSIBLE)
def test_impossible_settings_are_one_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        make()
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("room", "capacity", "max_regions", "region"),
    [
        (256 * MiB, 0, 1 << 20, 32 * MiB),  # several to evict by
        (1, 0, 1 << 20, 4 * MiB),
        (16 * 1024 * GiB, 16 * 1024 * GiB, 1 << 20, 4 * GiB),
        (256 * GiB, 256 * GiB, 512, 512 * MiB),
        (GiB // 8, 256 * GiB, 16384, 16 * MiB),  # a small share of a tenant
        (256 * MiB, 256 * MiB, -3, 128 * MiB),
    ],
)
def test_regions_are_fewer_than_open_files_allowed(
    room: int, capacity: int, max_regions: int, region: int
) -> None:
    bounds = {"capacity_bytes": capacity, "max_regions": max_regions}
    assert default_region_bytes(room, **bounds) == region


def test_a_mangled_configuration_does_not_leak_its_password() -> None:
    text = '{"mode":"tape","peers":{"url":"redis://:s3cret@192.0.2.1"}}'
    with pytest.raises(ConfigError) as caught:
        TieredConfig.from_environment({ENVIRONMENT_VARIABLE: text})
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("url", ["s3://me:hunter2@bucket/p", "s3://bucket/p?key=hunter2"])
def test_credentials_in_a_url_are_never_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="environment") as refused:
        bucket(url)
    assert "hunter2" not in str(refused.value)
