"""The configuration of the tiers: parsed once by the launcher, read in every process.

``TieredConfig`` travels from the launcher to SGLang's spawned processes in one environment
variable, because SGLang re-runs the plugin in each of them and module state does not survive.
All sizes are bytes.
"""

from __future__ import annotations

import enum
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = [
    "DEFAULT_OBJECT_BYTES",
    "ENVIRONMENT_VARIABLE",
    "MIN_REGIONS",
    "MIN_REGIONS_PER_DAY",
    "MIN_REGION_BYTES",
    "GiB",
    "IndexConfig",
    "KiB",
    "MiB",
    "NvmeConfig",
    "ObjectConfig",
    "TierMode",
    "TieredConfig",
    "TransferConfig",
    "cache_directory",
    "default_region_bytes",
    "default_tier_directory",
    "format_bytes",
    "parse_bytes",
    "parse_duration",
    "parse_mode",
    "parse_share",
]

ENVIRONMENT_VARIABLE = "SGLANG_TIERED_CONFIG"

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

MIN_REGION_BYTES = 4 * MiB
DEFAULT_REGION_BYTES = 256 * MiB
MAX_DEFAULT_REGIONS = 4096
"""Of a rank. Each is an open file, and each eviction looks at all."""
MIN_REGIONS = 2
"""One being written, one that can be evicted: with fewer, every eviction empties the tier."""

DEFAULT_OBJECT_BYTES = TiB
OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file")

MAX_TRANSFER_CONNECTIONS = 16
MIN_PEER_TIMEOUT_S = 2.0

MIN_REGIONS_PER_DAY = 10
"""A tenth of the day's writes is the largest burst (``policy.admission``); a region must fit."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}


class TierMode(enum.Enum):
    """Which tiers a server runs below device memory."""

    OFF = "off"  # stock SGLang: device memory only
    HOST = "host"
    NVME = "nvme"  # host memory and NVMe


class NvmeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The NVMe tier. ``capacity_bytes`` bounds the physical bytes of all ranks together,
    ``writes_per_day`` what they write in any 24 hours (None: no limit), and ``tenant_share`` how
    much of the capacity one tenant may take (None: all). ``warm_host``: prefixes in use before a
    restart are loaded into host memory after it. ``always_load``: whatever the tier holds is
    loaded, what it costs aside. ``trust_mm_hashes``: a client may say what its images hash to."""

    directory: str
    capacity_bytes: int
    region_bytes: int
    writes_per_day: int | None = None
    warm_host: bool = False
    always_load: bool = False
    tenant_share: float | None = None
    trust_mm_hashes: bool = False

    def __post_init__(self) -> None:
        _require_positive("--tier-nvme-bytes", self.capacity_bytes)
        _require_positive("--tier-nvme-region-bytes", self.region_bytes)
        if self.writes_per_day is not None:
            _require_positive("--tier-nvme-writes-per-day", self.writes_per_day)
        if self.region_bytes % 4096 or self.region_bytes < MIN_REGION_BYTES:
            raise ConfigError(
                f"--tier-nvme-region-bytes {self.region_bytes} must be a multiple of 4096 and at "
                f"least {format_bytes(MIN_REGION_BYTES)}."
            )


class ObjectConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The object tier below NVMe, shared by all servers that name it. ``capacity_bytes`` bounds
    what servers with the same model, weights and settings have in it together,
    ``ttl_s`` the age of what they find there. ``writes_per_day`` and ``requests_per_day`` are what
    this server, all ranks together, may write and ask in any 24 hours. Credentials are no part of
    it: they stay in the environment."""

    url: str
    capacity_bytes: int = DEFAULT_OBJECT_BYTES
    ttl_s: float | None = None
    writes_per_day: int | None = None
    requests_per_day: int | None = None
    codec: str = "none"

    def __post_init__(self) -> None:
        scheme, separator, rest = self.url.partition("://")
        if not separator or scheme not in OBJECT_SCHEMES or not rest.strip("/"):
            raise ConfigError(
                f"--tier-object-url {self.shown_url} is not a place for objects; write "
                "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or the absolute "
                "path of a shared directory."
            )
        if self.shown_url != self.url:
            raise ConfigError(
                f"--tier-object-url {self.shown_url} carries credentials or options; leave them "
                "out, they come from the environment (AWS_ACCESS_KEY_ID and the like)."
            )
        for flag, value in (
            ("--tier-object-bytes", self.capacity_bytes),
            ("--tier-object-writes-per-day", self.writes_per_day),
            ("--tier-object-requests-per-day", self.requests_per_day),
        ):
            if value is not None:
                _require_positive(flag, value)
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"--tier-object-ttl {self.ttl_s:g} must be greater than zero.")

    @property
    def shown_url(self) -> str:
        """The URL without what may be secret, for messages."""
        scheme, separator, rest = self.url.partition("://")
        place, _, path = rest.partition("/")
        path = path.split("?")[0].split("#")[0]
        return scheme + separator + place.rpartition("@")[2] + ("/" + path if "/" in rest else "")


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The Redis in which servers tell each other what they hold, and where this one serves it:
    rank 0 on ``port`` (None: any free one), the next on the next. ``url`` may carry a password."""

    url: str
    host: str = "127.0.0.1"
    port: int | None = None
    keys_directory: str | None = None

    @property
    def shown_url(self) -> str:
        """The URL without what may be secret, for messages."""
        scheme, separator, rest = self.url.partition("://")
        return scheme + separator + rest.rpartition("@")[2].partition("?")[0] if separator else "it"

    def __repr__(self) -> str:
        return f"IndexConfig({self.shown_url!r}, {self.host!r}, {self.port}, {self.keys_directory})"


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV handoff between prefill and decode instances. ``window_bytes``: data under way to one
    decode rank at most; ``peer_timeout_s``: silence after which a peer counts as dead;
    ``allowed_networks``: from which decode takes KV, besides its own; none: all with keys."""

    keys_directory: str | None = None
    encrypt_data: bool = False
    same_host: bool = True
    window_bytes: int = 64 * MiB
    num_connections: int = 1
    codec: str = "none"
    peer_timeout_s: float = 4.0
    allowed_networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_positive("--transfer-window-bytes", self.window_bytes)
        if not 1 <= self.num_connections <= MAX_TRANSFER_CONNECTIONS:
            raise ConfigError(
                f"--transfer-connections {self.num_connections} must be from 1 to "
                f"{MAX_TRANSFER_CONNECTIONS}."
            )
        if not MIN_PEER_TIMEOUT_S <= self.peer_timeout_s <= 3600:
            raise ConfigError(
                f"--transfer-peer-timeout {self.peer_timeout_s:g} must be from "
                f"{MIN_PEER_TIMEOUT_S:g} to 3600 seconds; peers greet each other every second."
            )
        if self.encrypt_data and self.keys_directory is None:
            raise ConfigError(
                "--transfer-encrypt all needs --transfer-keys; make keys with python -m "
                "sglang_tiered keygen."
            )

    @property
    def keys_path(self) -> Path | None:
        return None if self.keys_directory is None else Path(self.keys_directory)


class TieredConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the tiers need to know that SGLang's own arguments do not say."""

    mode: TierMode
    host_bytes: int | None = None  # None: SGLang's --hicache-ratio or --hicache-size decides
    nvme: NvmeConfig | None = None
    num_ranks: int = 1  # scheduler processes of this server on this machine; they share the caps
    tp_size: int = 1  # ranks that share the heads of a page
    pp_size: int = 1  # ranks that share its layers
    dp_size: int = 1  # groups of DP attention; replicas of plain data parallelism do not count
    transfer: TransferConfig | None = None  # None: the defaults
    object: ObjectConfig | None = None  # None: no object tier
    index: IndexConfig | None = None  # None: nothing is fetched from other servers

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError(f"num_ranks is {self.num_ranks}, but a server has at least one rank.")
        if self.host_bytes is not None:
            _require_positive("--tier-host-bytes", self.host_bytes)
        if (self.mode is TierMode.NVME) != (self.nvme is not None):
            raise ConfigError(f"mode {self.mode.value} and nvme settings contradict each other.")
        if self.object is not None and self.nvme is None:
            raise ConfigError(
                f"--tier-object-url needs the NVMe tier above it; drop it or --tier-mode "
                f"{self.mode.value}."
            )
        if self.nvme is not None:
            share, region = self.nvme_bytes_per_rank, self.nvme.region_bytes
            ranks = f" for each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
            if share < MIN_REGIONS * region:
                raise ConfigError(
                    f"--tier-nvme-bytes {format_bytes(self.nvme.capacity_bytes)} is too small: it "
                    f"must hold {MIN_REGIONS} regions of {format_bytes(region)}{ranks}; raise it, "
                    "lower --tier-nvme-region-bytes, or pass --tier-mode host."
                )
            tenant = self.max_tenant_bytes_per_rank
            if tenant is not None and tenant < MIN_REGIONS * region:
                raise ConfigError(
                    f"--tier-tenant-share {self.nvme.tenant_share:.4%} is too small: it must hold "
                    f"{MIN_REGIONS} regions of {format_bytes(region)}{ranks}; raise it or "
                    "--tier-nvme-bytes, lower --tier-nvme-region-bytes, or drop it to go without."
                )
            writes = self.nvme_writes_per_day_per_rank
            if writes is not None and writes < MIN_REGIONS_PER_DAY * region:
                raise ConfigError(
                    f"--tier-nvme-writes-per-day {format_bytes(self.nvme.writes_per_day or 0)} is "
                    f"too small: it must allow {MIN_REGIONS_PER_DAY} regions of "
                    f"{format_bytes(region)}{ranks}; raise it, lower --tier-nvme-region-bytes, or "
                    "drop it to write without a limit."
                )

    @property
    def host_bytes_per_rank(self) -> int | None:
        return None if self.host_bytes is None else self.host_bytes // self.num_ranks

    @property
    def nvme_bytes_per_rank(self) -> int:
        return 0 if self.nvme is None else self.nvme.capacity_bytes // self.num_ranks

    @property
    def max_tenant_bytes_per_rank(self) -> int | None:
        if self.nvme is None or self.nvme.tenant_share is None:
            return None
        return int(self.nvme_bytes_per_rank * self.nvme.tenant_share)

    @property
    def nvme_writes_per_day_per_rank(self) -> int | None:
        if self.nvme is None or self.nvme.writes_per_day is None:
            return None
        return self.nvme.writes_per_day // self.num_ranks

    def to_environment(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Publish to the processes started from here on."""
        environment[ENVIRONMENT_VARIABLE] = msgspec.json.encode(self).decode()

    @classmethod
    def from_environment(
        cls, environment: MutableMapping[str, str] = os.environ
    ) -> TieredConfig | None:
        """The launcher's configuration, or None where our launcher did not start this process."""
        text = environment.get(ENVIRONMENT_VARIABLE)
        if not text:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ConfigError(
                f"{ENVIRONMENT_VARIABLE} is set, but not to a tier configuration ({error}); unset "
                "it and start through sglang_tiered.launch_server."
            ) from None  # what is in it may be secret


def parse_mode(text: str) -> TierMode:
    """``off``, ``host`` or ``nvme``; anything else is a ``ConfigError``."""
    try:
        return TierMode(text)
    except ValueError:
        names = ", ".join(mode.value for mode in TierMode)
        raise ConfigError(f"--tier-mode {text} is unknown; choose one of {names}.") from None


def parse_bytes(flag: str, text: str, *, otherwise: str = "use --tier-mode to go without") -> int:
    """``64GiB`` (1024-based), ``64GB`` (1000-based) or plain bytes, as a positive integer.

    ``otherwise`` tells those who want none what to do instead.
    """
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"{flag} {text!r} is not a size; write a number with KiB, MiB, GiB, TiB (powers of "
            "1024), KB, MB, GB, TB (powers of 1000), or plain bytes."
        )
    value = int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1])
    if "." not in match[1]:
        value *= _UNITS[match[2].lower()]
    if value <= 0:
        raise ConfigError(f"{flag} {text} must be greater than zero; {otherwise}.")
    return value


def parse_duration(flag: str, text: str) -> float:
    """``90s``, ``30m``, ``12h``, ``7d`` or plain seconds; anything else is a ``ConfigError``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{flag} {text} is not a time; write for example 90s, 30m, 12h or 7d.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def parse_share(text: str) -> float:
    """``25%`` as 0.25; anything but 1% to 100% is a ``ConfigError``."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", text.strip())
    if match is None or not 1 <= float(match[1]) <= 100:
        raise ConfigError(
            f"--tier-tenant-share {text} is not a share; write a percentage from 1% to 100%, or "
            "drop it to let one tenant take all."
        )
    return float(match[1]) / 100


def format_bytes(num_bytes: int) -> str:
    """The shortest exact-looking form: ``64GiB``, ``1.5GiB``, ``512B``."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g}{unit}"
    return f"{num_bytes}B"


def default_region_bytes(
    room_bytes: int, *, capacity_bytes: int = 0, max_regions: int = MAX_DEFAULT_REGIONS
) -> int:
    """256 MiB, or a power of two that leaves little room at least eight regions to evict by. Larger
    where the cap of a rank would make more regions than are of use, or ``max_regions``, than the
    process may hold open."""
    region = DEFAULT_REGION_BYTES
    while region > MIN_REGION_BYTES and region * 8 > room_bytes:
        region //= 2
    most = min(max_regions, MAX_DEFAULT_REGIONS) if region == DEFAULT_REGION_BYTES else max_regions
    while region * max(most, MIN_REGIONS) < capacity_bytes:
        region *= 2
    return region


def cache_directory(environment: MutableMapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    base = environment.get("XDG_CACHE_HOME")
    return Path(base) if base else Path.home() / ".cache"


def default_tier_directory(environment: MutableMapping[str, str] = os.environ) -> Path:
    """``sglang-tiered/kv`` in the user's cache."""
    return cache_directory(environment) / "sglang-tiered" / "kv"


def _require_positive(flag: str, value: int) -> None:
    if value <= 0:
        raise ConfigError(f"{flag} {value} must be greater than zero.")
