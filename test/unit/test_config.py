"""Sizes, modes and the trip of the configuration through the environment."""

from __future__ import annotations

import pytest

from sglang_tiered.config import (
    ENVIRONMENT_VARIABLE,
    GiB,
    MiB,
    NvmeConfig,
    TieredConfig,
    TierMode,
    default_region_bytes,
    format_bytes,
    parse_bytes,
    parse_flush,
    parse_mode,
    parse_share,
)
from sglang_tiered.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 * GiB),
        ("64 gib", 64 * GiB),
        ("64GB", 64 * 10**9),
        ("1.5MiB", 3 * MiB // 2),
        ("4096", 4096),
        ("9007199254740993", 9007199254740993),  # beyond float: digits must not be lost
    ],
)
def test_size_with_unit_is_exact(text: str, expected: int) -> None:
    assert parse_bytes("--flag", text) == expected


@pytest.mark.parametrize("text", ["", "64G", "GiB", "1e9", "64XiB", "0x10", "nan", "1 2GiB"])
def test_ambiguous_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--flag .*KiB"):
        parse_bytes("--flag", text)


@pytest.mark.parametrize("text", ["0", "-1", "-4GiB", "0.0001"])
def test_zero_or_negative_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="greater than zero"):
        parse_bytes("--flag", text)


def test_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="off, host, nvme"):
        parse_mode("disk")


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
def test_mangled_environment_names_variable_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=ENVIRONMENT_VARIABLE):
        TieredConfig.from_environment({ENVIRONMENT_VARIABLE: text})


def test_cap_smaller_than_two_regions_per_rank_is_refused() -> None:
    nvme = NvmeConfig(directory="d", capacity_bytes=GiB, region_bytes=64 * MiB)
    make_config(nvme=nvme, num_ranks=8)
    with pytest.raises(ConfigError, match="--tier-nvme-bytes 1GiB is too small.*9 ranks"):
        make_config(nvme=nvme, num_ranks=9)


def test_write_budget_is_shared_by_the_ranks_and_holds_a_burst_of_one_region() -> None:
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
    with pytest.raises(ConfigError, match="--tier-nvme-region-bytes"):
        NvmeConfig(directory="d", capacity_bytes=GiB, region_bytes=region)


def test_small_caps_keep_several_regions_to_evict_by() -> None:
    assert default_region_bytes(256 * GiB) == 256 * MiB
    assert default_region_bytes(256 * MiB) == 32 * MiB
    assert default_region_bytes(1) == 4 * MiB


def test_sizes_print_as_people_write_them() -> None:
    assert format_bytes(64 * GiB) == "64GiB"
    assert format_bytes(3 * GiB // 2) == "1.5GiB"
    assert format_bytes(512) == "512B"


@pytest.mark.parametrize(("text", "share"), [("25%", 0.25), ("1%", 0.01), ("100%", 1.0)])
def test_a_tenants_share_is_a_percentage(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["25", "0.25", "0%", "0.5%", "101%", "-5%", "", "1e1%", "inf%"])
def test_another_form_of_a_share_is_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier-tenant-share .* percentage from 1% to 100%"):
        parse_share(text)


def test_a_share_is_of_each_ranks_part_and_holds_two_regions() -> None:
    nvme = NvmeConfig(
        directory="d", capacity_bytes=GiB, region_bytes=64 * MiB, tenant_share=0.25
    )  # fmt: skip
    assert make_config(nvme=nvme, num_ranks=2).max_tenant_bytes_per_rank == 128 * MiB
    assert make_config().max_tenant_bytes_per_rank is None
    with pytest.raises(ConfigError, match="--tier-tenant-share 25.* 2 regions of 64MiB.*3 ranks"):
        make_config(nvme=nvme, num_ranks=3)


def test_flush_knows_two_words() -> None:
    assert [parse_flush(word) for word in ("memory", "all")] == [False, True]
    with pytest.raises(ConfigError, match="--tier-flush nvme is unknown; choose one of memory"):
        parse_flush("nvme")
