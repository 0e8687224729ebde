"""The configuration of the tiers: parsed once by the launcher, read in every process.

``TieredConfig`` travels from the launcher to SGLang's spawned processes in one environment
variable, because SGLang re-runs the plugin in each of them and module state does not survive.
All sizes are bytes.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import (
    DIRECTORY,
    ON_OFF,
    SHARE,
    TIME,
    Flag,
    MiB,
    choice,
    count,
    format_bytes,
    size,
    text,
    within,
)
from sglang_tiered.remote_config import (
    ObjectConfig,  # noqa: TC001 - a field, decoded
    PeerConfig,  # noqa: TC001 - a field, decoded
)
from sglang_tiered.request_log import RequestLogConfig  # noqa: TC001 - a field, decoded

if TYPE_CHECKING:
    from collections.abc import MutableMapping


CACHE_BACKEND = "tiered"  # --radix-cache-backend
TRANSFER_BACKEND = "zmq"  # --disaggregation-transfer-backend
ENVIRONMENT_VARIABLE = "SGLANG_TIERED_CONFIG"

MIN_REGION_BYTES = 4 * MiB
DEFAULT_REGION_BYTES = 256 * MiB
MAX_DEFAULT_REGIONS = 4096
"""Of a rank. Each is an open file, and each eviction looks at all."""
MIN_REGIONS = 2
"""One being written, one that can be evicted: with fewer, every eviction empties the tier."""

TIER_CODECS = ("none", "zstd", "fp8", "int8")
"""Of ``codecs``, which this module may not import; a test compares them."""

TRANSFER_CODECS = ("none", "int8", "zstd")

MIN_REGIONS_PER_DAY = 10
"""A tenth of the day's writes is the largest burst (``policy.admission``); a region must fit."""


class TierMode(enum.Enum):
    """Which tiers a server runs below device memory."""

    OFF = "off"  # stock SGLang: device memory only
    HOST = "host"
    NVME = "nvme"  # host memory and NVMe


class NvmeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The NVMe tier, of all ranks together."""

    directory: Annotated[
        str,
        Flag(
            "--tier-dir",
            DIRECTORY,
            "Directory of the NVMe tier, on a local disk; created if missing, used by one server "
            "at a time.",
            default="`$XDG_CACHE_HOME/sglang-tiered/kv`",
        ),
    ]
    capacity_bytes: Annotated[
        int,
        Flag(
            "--tier-nvme-bytes",
            size("use --tier-mode to go without"),
            "Cap of the NVMe tier of all ranks together, in physical bytes.",
            default="a quarter of the disk space that is free, at most 256GiB",
        ),
    ]
    budget_directory: Annotated[
        str | None,
        Flag(
            "--tier-machine-budget",
            DIRECTORY,
            "Share `--tier-nvme-bytes`, which is then what all of them take together, with the "
            "other servers on this machine that name this directory and the same number: who is "
            "busy takes what others do not use. Keep it beside theirs.",
            default="a cap of its own",
        ),
    ] = None
    floor_bytes: Annotated[
        int | None,
        Flag(
            "--tier-nvme-floor",
            size("drop it for the default"),
            "What all ranks of this server together keep of `--tier-machine-budget`, however busy "
            "the others are.",
            default="an eighth of `--tier-nvme-bytes`",
        ),
    ] = None
    region_bytes: Annotated[
        int,
        Flag(
            "tier-nvme-region-bytes",
            size("drop it for the default"),
            "Size of one region file, the unit of eviction, open while it is there. It is larger "
            "where a page does not fit.",
            default="256MiB, less for caps below 2GiB, more for caps above 1TiB of a rank or where "
            "few files may be open (`ulimit -Hn`)",
        ),
    ]
    writes_per_day: Annotated[
        int | None,
        Flag(
            "--tier-nvme-writes-per-day",
            size("drop it to write without a limit"),
            "What all ranks together may write to the NVMe device in any 24 hours, e.g. `500GiB`; "
            "below it, prefixes seen twice and long ones go first.",
            default="no limit",
        ),
    ] = None
    codec: Annotated[
        str,
        Flag(
            "--tier-codec",
            choice({name: name for name in TIER_CODECS}),
            "How pages are stored on NVMe and in the bucket: as they are, in fewer bytes exactly "
            "(`zstd`), or in a way that changes the KV that comes back (`fp8`, `int8`), with "
            "pages of their own. Off while it is measured to cost more than it saves, unless NVMe "
            "is full.",
            default="`none`",
        ),
    ] = "none"
    always_load: Annotated[
        bool,
        Flag(
            "--tier-load",
            choice({"measured": False, "always": True}),
            "What to load of what NVMe holds: what is measured to be cheaper than computing, or "
            "everything.",
            default="`measured`",
        ),
    ] = False
    both_ends: Annotated[
        bool,
        Flag(
            "--tier-both-ends",
            ON_OFF,
            "Compute the front of a prefix while its back loads, where that is sooner.",
            default="`on`",
        ),
    ] = True
    checkpoint_tokens: Annotated[
        int | None,
        Flag(
            "--tier-checkpoint-tokens",
            count("N"),
            "Keep what a request generates every so many tokens, at whole pages, not at its end "
            "only. When its server dies, so much is computed again, and what was not stored yet. "
            "Not of states, sessions and beams.",
            default="at the end of a request",
        ),
    ] = None
    tenant_share: Annotated[
        float | None,
        Flag(
            "--tier-tenant-share",
            SHARE,
            "The most of the NVMe tier that one tenant may take, e.g. `25%`.",
            default="no limit",
        ),
    ] = None
    trust_mm_hashes: Annotated[
        bool,
        Flag(
            "--tier-trust-mm-hashes",
            ON_OFF,
            "Take `mm_hashes` of a request for what its images hash to, and `input_ids` past the "
            "vocabulary. Only where every client is trusted: one could store its image's pages "
            "under another's name.",
            default="`off`",
        ),
    ] = False

    memory_bytes: int = 0  # what it may still take of memory: its directory is on a tmpfs

    def __post_init__(self) -> None:
        if self.floor_bytes is not None and self.budget_directory is None:
            raise ConfigError(
                "--tier-nvme-floor needs --tier-machine-budget; pass it, or drop this."
            )
        if not 0 < (self.floor_bytes or 1) <= self.capacity_bytes:
            raise ConfigError(
                f"--tier-nvme-floor {format_bytes(self.floor_bytes or 0)} must be at most "
                f"--tier-nvme-bytes {format_bytes(self.capacity_bytes)}; lower it."
            )
        if self.region_bytes % 4096 or self.region_bytes < MIN_REGION_BYTES:
            raise ConfigError(
                f"tier-nvme-region-bytes {self.region_bytes} must be a multiple of 4096 and at "
                f"least {format_bytes(MIN_REGION_BYTES)}."
            )


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV handoff between prefill and decode instances."""

    keys_directory: Annotated[
        str | None,
        Flag(
            "--transfer-keys",
            DIRECTORY,
            "Directory, writable by its owner only, with the keys of this role and its peers "
            "(`sglang-tiered keygen`). With it peers know each other and the control "
            "channel is encrypted.",
            default="none",
        ),
    ] = None
    encrypt_data: Annotated[
        bool,
        Flag(
            "--transfer-encrypt",
            choice({"control": False, "all": True}),
            "What the keys encrypt: the control channel, with headers of KV authenticated, or KV "
            "too, at about half a gigabyte per second.",
            default="`control`",
        ),
    ] = False
    allowed_networks: Annotated[
        tuple[str, ...],
        Flag(
            "--transfer-allow",
            text("ADDRESSES"),
            "Prefill instances on other machines from which decode takes KV: addresses or networks "
            "with commas, e.g. `192.0.2.0/24`.",
            default="all with `--transfer-keys`, none without",
        ),
    ] = ()
    same_host: Annotated[
        bool,
        Flag(
            "transfer-same-host",
            choice({"auto": True, "off": False}),
            "Whether decode reads KV out of the memory of a prefill instance on its own machine, "
            "where the system lets it.",
            default="`auto`",
        ),
    ] = True
    window_bytes: Annotated[
        int,
        Flag(
            "transfer-window-bytes",
            size("drop it for the default"),
            "KV under way to one decode rank at most.",
            default="64MiB",
        ),
    ] = 64 * MiB
    num_connections: Annotated[
        int,
        Flag(
            "--transfer-connections",
            within(count("N"), 1, 16),
            "TCP connections of KV per pair of ranks; 2 to 4 for links of 25 Gbit/s and more.",
            default="1",
        ),
    ] = 1
    codec: Annotated[
        str,
        Flag(
            "--transfer-codec",
            choice({name: name for name in TRANSFER_CODECS}),
            "How KV travels, the same on both sides: as it is; in a byte per element, which "
            "changes it a little; or compressed without loss. For links of a few Gbit/s.",
            default="`none`",
        ),
    ] = "none"
    model_name: Annotated[
        str | None,
        Flag(
            "--transfer-model",
            text("NAME"),
            "On both sides: the model of every server of this name is equal. Decode stores by it.",
            default="by the files of the model",
        ),
    ] = None
    peer_timeout_s: Annotated[
        float,
        Flag(
            "transfer-peer-timeout",
            within(TIME, 2, 3600, "s"),  # peers greet each other every second
            "Silence after which a peer counts as dead. One that ends is noticed at once.",
            default="4s",
        ),
    ] = 4.0
    ping_interval_s: float = 1.0
    connect_timeout_s: float = 3.0
    progress_timeout_s: float = 10.0  # while sent data may stay unanswered, or a gap unfilled
    orphan_timeout_s: float = 60.0  # of a room that waits on prefill for its request, or the latter
    tombstone_s: float = 60.0
    max_orphans: int = 8192

    @property
    def keys_path(self) -> Path | None:
        return None if self.keys_directory is None else Path(self.keys_directory)


class TieredConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the tiers need to know that SGLang's own arguments do not say."""

    mode: Annotated[
        TierMode,
        Flag(
            "--tier-mode",
            choice({mode.value: mode for mode in TierMode}),
            "Tiers below device memory: none (stock SGLang), host memory, or host memory and NVMe.",
            default="`nvme`",
        ),
    ]
    host_bytes: Annotated[
        int | None,
        Flag(
            "--tier-host-bytes",
            size("use --tier-mode to go without"),
            "Host memory tier of all ranks together, e.g. `64GiB`.",
            default="twice the device pool, at most four fifths of the memory that can be had "
            "(SGLang's `--hicache-host-memory-fraction`)",
        ),
    ] = None
    nvme: NvmeConfig | None = None
    num_ranks: int = 1  # scheduler processes of this server on this machine; they share the caps
    tp_size: int = 1  # ranks that share the heads of a page
    pp_size: int = 1  # ranks that share its layers
    dp_size: int = 1  # groups of DP attention; replicas of plain data parallelism do not count
    transfer: TransferConfig | None = None  # None: the defaults
    object: ObjectConfig | None = None  # None: no object tier
    peers: PeerConfig | None = None  # None: nothing is fetched from other servers
    request_log: RequestLogConfig | None = None  # None: no line is written of a request

    def __post_init__(self) -> None:
        if self.nvme is not None:
            share, region = self.nvme_bytes_per_rank, self.nvme.region_bytes
            ranks = f" for each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
            if share < MIN_REGIONS * region:
                given, flag = self.nvme.capacity_bytes, "--tier-nvme-bytes"
                if self.nvme.floor_bytes is not None:
                    given, flag = self.nvme.floor_bytes, "--tier-nvme-floor"
                raise ConfigError(
                    f"{flag} {format_bytes(given)} is too small: it "
                    f"must hold {MIN_REGIONS} regions of {format_bytes(region)}{ranks}; raise it, "
                    "lower tier-nvme-region-bytes, or pass --tier-mode host."
                )
            tenant = self.max_tenant_bytes_per_rank
            if tenant is not None and tenant < MIN_REGIONS * region:
                raise ConfigError(
                    f"--tier-tenant-share {self.nvme.tenant_share:.4%} is too small: it must hold "
                    f"{MIN_REGIONS} regions of {format_bytes(region)}{ranks}; raise it or "
                    "--tier-nvme-bytes, lower tier-nvme-region-bytes, or drop it to go without."
                )
            writes = self.nvme_writes_per_day_per_rank
            if writes is not None and writes < MIN_REGIONS_PER_DAY * region:
                raise ConfigError(
                    f"--tier-nvme-writes-per-day {format_bytes(self.nvme.writes_per_day or 0)} is "
                    f"too small: it must allow {MIN_REGIONS_PER_DAY} regions of "
                    f"{format_bytes(region)}{ranks}; raise it, lower tier-nvme-region-bytes, or "
                    "drop it to write without a limit."
                )

    @property
    def host_bytes_per_rank(self) -> int | None:
        return None if self.host_bytes is None else self.host_bytes // self.num_ranks

    @property
    def nvme_bytes_per_rank(self) -> int:
        """What a rank may always take; more while others of a machine's budget do not use it."""
        if self.nvme is None:
            return 0
        if self.nvme.budget_directory is None:
            return self.nvme.capacity_bytes // self.num_ranks
        return (self.nvme.floor_bytes or 0) // self.num_ranks

    @property
    def most_nvme_bytes_per_rank(self) -> int:
        if self.nvme is None or self.nvme.budget_directory is None:
            return self.nvme_bytes_per_rank
        return self.nvme.capacity_bytes

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

    @property
    def object_of_rank(self) -> ObjectConfig | None:
        """The bucket of a rank, which has its own namespace there: its share of all limits."""
        if self.object is None:
            return None
        names = ("capacity_bytes", "writes_per_day", "requests_per_day")
        limits = {name: getattr(self.object, name) for name in names}
        shares = {n: max(1, most // self.num_ranks) for n, most in limits.items() if most}
        return msgspec.structs.replace(self.object, **shares)

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
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
