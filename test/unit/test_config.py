"""Settings that cannot work together, and their trip through the environment."""

from __future__ import annotations

import pytest

from sglang_tiered.codecs import CODEC_NAMES
from sglang_tiered.config import (
    ENVIRONMENT_VARIABLE,
    TIER_CODECS,
    TRANSFER_CODECS,
    GiB,
    MiB,
    NvmeConfig,
    ObjectConfig,
    TieredConfig,
    TierMode,
    default_region_bytes,
    format_bytes,
)
from sglang_tiered.errors import ConfigError
from sglang_tiered.peer_config import PeerConfig
from sglang_tiered.transfer.wire_codec import CODECS as WIRE_CODECS


def make_config(**changes: object) -> TieredConfig:
    nvme = NvmeConfig(directory="d", capacity_bytes=GiB, region_bytes=64 * MiB)
    settings: dict[str, object] = {"mode": TierMode.NVME, "host_bytes": GiB, "nvme": nvme}
    return TieredConfig(**{**settings, **changes})  # type: ignore[arg-type]


def test_config_survives_the_environment() -> None:
    environment: dict[str, str] = {}
    nvme = NvmeConfig(
        directory="d", capacity_bytes=GiB, region_bytes=64 * MiB, writes_per_day=GiB * 500
    )
    config = make_config(num_ranks=4, nvme=nvme)
    config.to_environment(environment)
    assert TieredConfig.from_environment(environment) == config


def test_absent_environment_is_no_configuration() -> None:
    assert TieredConfig.from_environment({}) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"mode":"nvme"}', '{"mode":"tape"}'])
def test_mangled_environment_names_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match=ENVIRONMENT_VARIABLE):
        TieredConfig.from_environment({ENVIRONMENT_VARIABLE: text})


def test_cap_below_two_regions_per_rank_is_refused() -> None:
    nvme = NvmeConfig(directory="d", capacity_bytes=GiB, region_bytes=64 * MiB)
    make_config(nvme=nvme, num_ranks=8)
    with pytest.raises(ConfigError, match="--tier-nvme-bytes 1GiB is too small.*9 ranks"):
        make_config(nvme=nvme, num_ranks=9)


def test_write_budget_per_rank_holds_a_burst() -> None:
    nvme = NvmeConfig(
        directory="d", capacity_bytes=GiB, region_bytes=64 * MiB, writes_per_day=1280 * MiB
    )
    assert make_config(nvme=nvme, num_ranks=2).nvme_writes_per_day_per_rank == 640 * MiB
    assert make_config().nvme_writes_per_day_per_rank is None
    sentence = "--tier-nvme-writes-per-day 1.25GiB is too small.*10 regions of 64MiB.*3 ranks"
    with pytest.raises(ConfigError, match=sentence):
        make_config(nvme=nvme, num_ranks=3)


@pytest.mark.parametrize("writes", [0, -1])
def test_write_budget_of_nothing_is_refused(writes: int) -> None:
    with pytest.raises(ConfigError, match="--tier-nvme-writes-per-day .* greater than zero"):
        NvmeConfig(directory="d", capacity_bytes=GiB, region_bytes=4 * MiB, writes_per_day=writes)


@pytest.mark.parametrize("region", [4096, 4 * MiB + 1, 0, -4 * MiB])
def test_unusable_region_size_is_refused(region: int) -> None:
    with pytest.raises(ConfigError, match="tier-nvme-region-bytes"):
        NvmeConfig(directory="d", capacity_bytes=GiB, region_bytes=region)


def test_small_caps_keep_several_regions_to_evict_by() -> None:
    assert default_region_bytes(256 * GiB) == 256 * MiB
    assert default_region_bytes(256 * MiB) == 32 * MiB
    assert default_region_bytes(1) == 4 * MiB


@pytest.mark.parametrize(
    ("room", "capacity", "max_regions", "region"),
    [
        (1024 * GiB, 1024 * GiB, 1 << 20, 256 * MiB),
        (16 * 1024 * GiB, 16 * 1024 * GiB, 1 << 20, 4 * GiB),
        (256 * GiB, 256 * GiB, 512, 512 * MiB),
        (GiB // 8, 256 * GiB, 16384, 16 * MiB),  # a small share of a tenant
        (GiB // 8, 256 * GiB, 1024, 256 * MiB),
        (256 * MiB, 256 * MiB, -3, 128 * MiB),
    ],
)
def test_regions_are_fewer_than_open_files_allowed(
    room: int, capacity: int, max_regions: int, region: int
) -> None:
    chosen = default_region_bytes(room, capacity_bytes=capacity, max_regions=max_regions)
    assert chosen == region


def test_sizes_print_as_people_write_them() -> None:
    assert format_bytes(64 * GiB) == "64GiB"
    assert format_bytes(3 * GiB // 2) == "1.5GiB"
    assert format_bytes(512) == "512B"


def test_a_tenants_share_holds_two_regions_per_rank() -> None:
    nvme = NvmeConfig(
        directory="d", capacity_bytes=GiB, region_bytes=64 * MiB, tenant_share=0.25
    )  # fmt: skip
    assert make_config(nvme=nvme, num_ranks=2).max_tenant_bytes_per_rank == 128 * MiB
    assert make_config().max_tenant_bytes_per_rank is None
    with pytest.raises(ConfigError, match="--tier-tenant-share 25.* 2 regions of 64MiB.*3 ranks"):
        make_config(nvme=nvme, num_ranks=3)


def test_object_settings_survive_the_environment() -> None:
    below = ObjectConfig(
        url="s3://bucket/prefix",
        capacity_bytes=GiB,
        ttl_s=86400.0,
        writes_per_day=GiB,
        requests_per_day=1000,
    )
    environment: dict[str, str] = {}
    make_config(object=below).to_environment(environment)
    read = TieredConfig.from_environment(environment)
    assert read is not None
    assert read.object == below


def test_peer_settings_survive_and_hide_the_password() -> None:
    index = PeerConfig(
        servers="a:1", url="redis://me:pass@word@192.0.2.1:6379/2", host="0.0.0.0", port=4000
    )
    environment: dict[str, str] = {}
    config = make_config(peers=index)
    config.to_environment(environment)
    assert TieredConfig.from_environment(environment) == config
    assert index.shown_url == "redis://192.0.2.1:6379/2"
    assert "word" not in f"{config!r} {config} {index!r} {[index]}"


def test_a_mangled_configuration_does_not_leak_its_password() -> None:
    text = '{"mode":"tape","peers":{"url":"redis://:s3cret@192.0.2.1"}}'
    with pytest.raises(ConfigError) as caught:
        TieredConfig.from_environment({ENVIRONMENT_VARIABLE: text})
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_object_tier_needs_nvme_above_it() -> None:
    with pytest.raises(ConfigError, match="needs the NVMe tier"):
        make_config(mode=TierMode.HOST, nvme=None, object=ObjectConfig(url="s3://b/p"))


@pytest.mark.parametrize("url", ["", "bucket", "s3://", "http://127.0.0.1/b", "s3:/b", "s4://b"])
def test_a_wrong_object_url_is_refused_with_examples(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--tier-object-url .*gs://bucket/prefix"):
        ObjectConfig(url=url)


@pytest.mark.parametrize("url", ["s3://me:hunter2@bucket/p", "s3://bucket/p?key=hunter2"])
def test_credentials_in_a_url_are_never_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="environment") as refused:
        ObjectConfig(url=url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"capacity_bytes": 0}, "--tier-object-bytes"),
        ({"ttl_s": 0.0}, "--tier-object-ttl"),
        ({"writes_per_day": -1}, "--tier-object-writes-per-day"),
        ({"requests_per_day": 0}, "--tier-object-requests-per-day"),
    ],
)
def test_impossible_object_settings_are_one_sentence(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        ObjectConfig(**{"url": "s3://b/p", **settings})  # type: ignore[arg-type]
    assert str(refused.value).count("\n") == 0


def test_codecs_are_those_that_exist() -> None:
    assert set(TIER_CODECS) == set(CODEC_NAMES)
    assert set(TRANSFER_CODECS) == set(WIRE_CODECS)
