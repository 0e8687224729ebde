"""The flags of this package beside SGLang's, turned into configuration before a server starts.

``resolve`` refuses every bad combination with one sentence before anything is touched, and returns
the configuration and the argument list for SGLang. It reads the machine's free memory and disk, and
keys, and tries the ports of sharing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.codecs import LOSSY_CODEC_NAMES
from sglang_tiered.config import (
    CACHE_BACKEND,
    MIN_REGION_BYTES,
    MIN_REGIONS,
    TRANSFER_BACKEND,
    NvmeConfig,
    TieredConfig,
    TierMode,
    TransferConfig,
    cache_directory,
    default_region_bytes,
)
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import (
    GiB,
    add_arguments,
    flags_of,
    format_bytes,
    refuse_given,
    require,
    values_of,
)
from sglang_tiered.integration.attention import pod_flags
from sglang_tiered.integration.platforms.memory import allocatable_bytes
from sglang_tiered.integration.start import try_port
from sglang_tiered.integration.storage.shards import sizes_of
from sglang_tiered.integration.storage.tiers import peer_settings
from sglang_tiered.loopback import is_loopback, is_loopback_url
from sglang_tiered.remote_config import ObjectConfig, PeerConfig
from sglang_tiered.request_log import RequestLogConfig
from sglang_tiered.sharing.settings import parse_targets
from sglang_tiered.storage.filesystem import MEMORY_FILESYSTEMS, filesystem_type
from sglang_tiered.storage.region.directory import max_regions
from sglang_tiered.transfer.addresses import parse_networks
from sglang_tiered.wire.keys import PEER, load_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


DEFAULT_PAGE_SIZE = 64
DEFAULT_DISK_FRACTION = 0.25
DEFAULT_DISK_MAX_BYTES = 256 * GiB
DEFAULT_FLOOR_PART = 8  # of what servers share, the part that each keeps

# How long a request waits for a load that no price bounds: with ``--tier-load always``, and in a
# pipeline. A tier that reports itself unhealthy ends the wait at once.
LOAD_DEADLINE_S = 10.0
LOAD_DEADLINE_S_PER_1024_TOKENS = 1.0

# Values of AWS_SERVER_SIDE_ENCRYPTION that obstore knows, and those that take a key's name.
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse", "sse-c")
_NAMING_A_KEY = ("aws:kms", "aws:kms:dsse")

# Of SGLang: what selects another cache below, beside or instead of the radix cache, or changes a
# request's key behind our back, where no purge would find it.
_EXCLUSIVE = (
    "disable_radix_cache",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "radix_cache_backend",
    "enable_kv_cache_sharding",
    "elastic_ep_backend",
    "disaggregation_decode_enable_offload_kvcache",
)
_STORAGE = ("hicache_storage_backend", "hicache_storage_backend_extra_config")
_SIZES = (
    "page_size",
    "tp_size",
    "pp_size",
    "dp_size",
    "attn_dp_size",
    "nnodes",
    "max_total_tokens",
)


ROLES = ("prefill", "decode")

MAX_FAULT_THREADS = 8

URL_VARIABLE = "SGLANG_TIERED_INDEX_URL"
"""Replaces ``--tier-index``: every user of a machine can read a command line."""

DEFAULT_HOST = "127.0.0.1"  # of SGLang
MAX_PORT = 65535

NVME_FLAGS = flags_of(NvmeConfig, ObjectConfig, PeerConfig, RequestLogConfig)
"""Flags that mean nothing without an NVMe tier."""
TIER_FLAGS = flags_of(TieredConfig) + NVME_FLAGS
ALL_FLAGS = TIER_FLAGS + flags_of(TransferConfig)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Holds what a command line resolves to. ``notes`` are sentences for the operator."""

    config: TieredConfig
    sglang_arguments: list[str]
    notes: tuple[str, ...] = ()


def add_tier_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this package as sections of ``--help``. Values stay text, which ``resolve``
    checks."""
    tiering = parser.add_argument_group(
        "tiering", "The tiers below device memory (sglang-tiered). Sizes: 64GiB, 64GB or bytes."
    )
    add_arguments(tiering, TieredConfig, NvmeConfig, ObjectConfig, PeerConfig, RequestLogConfig)
    transfer = parser.add_argument_group(
        "KV transfer", "Prefill and decode on different instances, over ZeroMQ (sglang-tiered)."
    )
    add_arguments(transfer, TransferConfig)


def explicit_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the user gave, without defaults, parsed and checked by ``parser``."""
    unset: Any = object()
    nothing = argparse.Namespace(**{action.dest: unset for action in parser._actions})  # noqa: SLF001
    found = vars(parser.parse_args(list(arguments), nothing))
    return {name: value for name, value in found.items() if value is not unset}


def _without_our_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that SGLang knows. Ours may be abbreviated, as SGLang's may."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in ALL_FLAGS:
        parser.add_argument(flag.option)
    return parser.parse_known_args(list(arguments))[1]


def resolve(explicit: Mapping[str, Any], arguments: Sequence[str], *, on_cpu: bool) -> Resolved:
    """Check the given flags and complete them. Raises ``ConfigError``; changes nothing."""
    completed = _without_our_flags(arguments)
    values = values_of(TieredConfig, explicit)
    mode = values.get("mode", TierMode.NVME)
    for sentence in _conflicts(explicit, mode, on_cpu=on_cpu):
        raise ConfigError(sentence)
    default_page_size = 1 if mode is TierMode.OFF else DEFAULT_PAGE_SIZE
    pod_flags.check_arguments(explicit, explicit.get("page_size", default_page_size))
    if mode is not TierMode.NVME:
        flags = TIER_FLAGS if mode is TierMode.OFF else NVME_FLAGS
        why = f"has no meaning with --tier-mode {mode.value}; drop one of them"
        refuse_given({**explicit, "tier_mode": None}, flags, why)
    has_nvme, sizes, notes = mode is TierMode.NVME, sizes_of(explicit), list[str]()
    num_ranks = sizes.num_ranks
    host_bytes = _resolve_host(explicit, values.get("host_bytes"))
    config = TieredConfig(
        mode=mode,
        host_bytes=host_bytes,
        nvme=_resolve_nvme(explicit, num_ranks, host_bytes or 0, notes) if has_nvme else None,
        transfer=resolve_transfer(explicit),
        object=resolve_object(explicit) if has_nvme else None,
        peers=resolve_peers(explicit, num_ranks) if has_nvme else None,
        request_log=_resolve_request_log(explicit),
    )
    config = sizes.put_into(config)
    for flag, value in added_arguments(explicit, config, on_cpu=on_cpu).items():
        if flag.lstrip("-").replace("-", "_") not in explicit:
            completed += [flag] if value is None else [flag, value]
    return Resolved(config, completed, (*notes, *warnings(explicit, config, on_cpu=on_cpu)))


def resolve_here(explicit: Mapping[str, Any], arguments: Sequence[str]) -> Resolved:
    """``resolve`` on this machine. Sets the environment of what is started; touches no tier."""
    import torch

    resolved = resolve(explicit, arguments, on_cpu=not torch.cuda.is_available())
    if resolved.config.mode is not TierMode.OFF:
        # Has SGLang make its host pool of private memory, which may be huge pages. By default it is
        # shared memory of 4 KiB pages: a disk then moves each page of KV in hundreds of pieces.
        # Reads of 2 MiB reached 1.24 GB/s on a virtual disk, and 3.07 into huge pages. SGLang's own
        # threads fault such memory in.
        threads = min(MAX_FAULT_THREADS, len(os.sched_getaffinity(0)))
        os.environ.setdefault("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", str(threads))
    if resolved.config.mode is TierMode.NVME:
        _build_page_hash()
    return resolved


def _build_page_hash() -> None:
    """Build SGLang's page hash extension now. Raises ``ConfigError`` where it cannot be built.

    SGLang builds it at the first prefill, where it would stall a request for seconds, and where
    a missing compiler would end the scheduler.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        get_hash_str([0], page_size=1)
    except Exception as error:  # whatever the build tools raised
        why = textwrap.shorten(str(error.__cause__ or error), width=100, placeholder=" ...")
        raise ConfigError(
            f"SGLang's page hash extension cannot be built ({why}), and the tiers below host "
            "memory name pages with it; install a C++ compiler and the headers of OpenSSL and "
            "Python (Debian: apt-get install g++ libssl-dev python3-dev), or pass --tier-mode host."
        ) from error


def _conflicts(explicit: Mapping[str, Any], mode: TierMode, *, on_cpu: bool) -> Iterator[str]:
    """Yield what of SGLang's flags cannot work on this machine, or with these tiers."""
    for name in _SIZES:
        if explicit.get(name) is not None and explicit[name] < 1:
            yield f"{_flag(name)} {explicit[name]} must be at least 1."
    if on_cpu and str(explicit.get("device", "")).startswith("cuda"):
        yield "--device cuda needs a GPU, and torch sees none here; drop it."
    if mode is TierMode.OFF:
        return
    for name in (*_EXCLUSIVE, *(_STORAGE if mode is TierMode.NVME else ())):
        if explicit.get(name) not in (None, False):
            yield f"{_flag(name)} cannot run with tiering; drop it, or pass --tier-mode off."
    if explicit.get("enable_hierarchical_cache", True) is False:  # no command line says so
        yield "enable_hierarchical_cache=False leaves no tiers; drop it, or pass tier_mode='off'."
    if explicit.get("hicache_host_memory_mode", "cache") != "cache":
        yield (
            "--hicache-host-memory-mode buffer_only leaves no host tier; drop it, or pass "
            "--tier-mode off."
        )
    if mode is TierMode.HOST:
        return
    if (dcp_size := explicit.get("dcp_size") or 1) > 1:
        yield (
            f"--dcp-size {dcp_size} splits pages over ranks, which SGLang's storage interface "
            "does not describe; drop it, or pass --tier-mode host."
        )
    if explicit.get("hicache_storage_prefetch_retry_max_attempts", 1) < 1:
        yield (
            "--hicache-storage-prefetch-retry-max-attempts must be at least 1, or loads that wait "
            "for a turn or for other ranks never begin; drop it."
        )


def added_arguments(
    explicit: Mapping[str, Any], config: TieredConfig, *, on_cpu: bool
) -> dict[str, str | None]:
    """Return the flags that SGLang needs besides, where the user gave no others."""
    added: dict[str, str | None] = {}
    if on_cpu:
        # An idle scheduler polls without a pause: a core that other servers could compute on.
        added["--sleep-on-idle"] = None
    if config.transfer is not None:
        added["--disaggregation-transfer-backend"] = TRANSFER_BACKEND
        may_decode = explicit.get("disaggregation_mode") == "decode"
        if config.mode is not TierMode.OFF and (
            may_decode or explicit.get("enable_pd_role_switch")
        ):  # so that prefill sends only what the tiers do not hold
            added["--disaggregation-decode-enable-radix-cache"] = None
    if config.mode is not TierMode.OFF:
        added |= {
            "--radix-cache-backend": CACHE_BACKEND,
            "--enable-hierarchical-cache": None,
            "--enable-cache-report": None,  # or no OpenAI client sees what came from a tier
            "--page-size": str(DEFAULT_PAGE_SIZE),
        }
    if config.host_bytes is not None:
        # Whole gigabytes are all this flag can say; TieredRadixCache sets the exact size.
        added["--hicache-size"] = str(max(1, round(config.host_bytes / config.num_ranks / 1e9)))
    if config.nvme is not None:
        added |= _storage_arguments(explicit.get("page_size", DEFAULT_PAGE_SIZE))
    return added


def _storage_arguments(page_size: int) -> dict[str, str | None]:
    extra = {
        "backend_name": "sglang-tiered",
        "module_path": "sglang_tiered.integration.storage.backend",
        "class_name": "TieredStorage",
        # SGLang's default of 256 tokens leaves shorter tails to be computed again.
        "prefetch_threshold": page_size,
        "prefetch_timeout_base": LOAD_DEADLINE_S,
        "prefetch_timeout_per_ki_token": LOAD_DEADLINE_S_PER_1024_TOKENS,
    }
    return {
        "--hicache-storage-backend": "dynamic",
        "--hicache-storage-backend-extra-config": json.dumps(extra),
        "--hicache-storage-prefetch-policy": "timeout",
    }


def warnings(explicit: Mapping[str, Any], config: TieredConfig, *, on_cpu: bool) -> Iterator[str]:
    """Yield what works, but perhaps not as its operator expects."""
    if on_cpu and "mem_fraction_static" in explicit:
        yield (
            "--mem-fraction-static is a share of a GPU's memory and has no meaning on a CPU, where "
            "device and host memory come from one budget; --max-total-tokens sizes the device pool."
        )
    transfer, is_alone = config.transfer, is_loopback(explicit.get("host") or "127.0.0.1")
    may_take_kv = transfer is None or transfer.keys_path is not None or transfer.allowed_networks
    if explicit.get("enable_pd_role_switch") and not may_take_kv and not is_alone:
        yield (
            "with --enable-pd-role-switch this server may come to decode, and then fails all "
            "requests whose prefill is on another machine; name those in --transfer-allow, or pass "
            "--transfer-keys."
        )
    if (exposed := exposure(config.peers)) is not None:
        yield exposed


def _resolve_host(explicit: Mapping[str, Any], host_bytes: int | None) -> int | None:
    if host_bytes is None:
        return None  # SGLang decides, once it knows the device pool
    text = explicit["tier_host_bytes"]
    for name in ("hicache_size", "hicache_ratio"):
        if name in explicit:
            raise ConfigError(
                f"--tier-host-bytes {text} and {_flag(name)} both size the host tier; drop one."
            )
    available = allocatable_bytes()
    if host_bytes > available:
        raise ConfigError(
            f"--tier-host-bytes {text} is more than the {format_bytes(available)} of memory that "
            "can be allocated here (free memory less SGLang's reserve); lower it."
        )
    return host_bytes


def _resolve_nvme(
    explicit: Mapping[str, Any], num_ranks: int, host_bytes: int, notes: list[str]
) -> NvmeConfig:
    values = values_of(NvmeConfig, explicit)
    place = (cache_directory() / "sglang-tiered" / "kv").absolute()
    directory = Path(values.setdefault("directory", str(place)))
    parent, held = _existing_parent(directory), _held_bytes(directory)
    disk, kind = shutil.disk_usage(parent), filesystem_type(parent)
    is_memory, is_shared = kind in MEMORY_FILESYSTEMS, "budget_directory" in values
    most = disk.free + held
    if is_memory:
        there = max(0, allocatable_bytes() - host_bytes) + held
        most = min(most, there) if kind == "tmpfs" else there  # a ramfs tells no size
    capacity = values.get("capacity_bytes")
    if is_shared:
        if capacity is None:
            raise ConfigError(
                "--tier-machine-budget needs --tier-nvme-bytes: what its servers take together."
            )
        values.setdefault("floor_bytes", capacity // DEFAULT_FLOOR_PART)
        most = max(disk.total, held)  # others may hold it now, and give it back
    if capacity is None:
        capacity = min(DEFAULT_DISK_MAX_BYTES, int(most * DEFAULT_DISK_FRACTION))
        if capacity < MIN_REGIONS * MIN_REGION_BYTES * num_ranks:
            raise ConfigError(
                f"--tier-dir {directory} has only {format_bytes(most - held)} of free disk space; "
                "pass another --tier-dir, or --tier-mode host."
            )
        values["capacity_bytes"] = capacity
    elif capacity > most:
        given = f"--tier-nvme-bytes {explicit['tier_nvme_bytes']} is more than the"
        if is_memory:
            raise ConfigError(
                f"{given} {format_bytes(most)} of memory that {directory} can take, which is on "
                f"{kind}; lower it or --tier-host-bytes, or pass a --tier-dir on a disk."
            )
        notes.append(
            f"{given} {format_bytes(most)} that {directory} can take now; the tier stops growing "
            "when the disk is full."
        )
    if is_memory:
        values["memory_bytes"] = max(0, capacity - held)
        notes.append(
            f"--tier-dir {directory} is on {kind}, which is memory: the NVMe tier may take "
            f"{format_bytes(capacity)} of it beside the host tier, and loses its pages with a "
            "reboot; pass a --tier-dir on a disk to keep them."
        )
    # A region must also fit a disk that is smaller than the cap.
    least = values.get("floor_bytes", capacity)
    room = int(min(least, most) / num_ranks * values.get("tenant_share", 1))
    per_rank, files = capacity // (1 if is_shared else num_ranks), max_regions()
    region = values.get("region_bytes")
    if region is None:
        region = default_region_bytes(room, capacity_bytes=per_rank, max_regions=files)
        values["region_bytes"] = region
    elif region >= MIN_REGION_BYTES and per_rank // region > files:
        raise ConfigError(
            f"tier-nvme-region-bytes {explicit['tier_nvme_region_bytes']} makes "
            f"{per_rank // region} files of each rank's {format_bytes(per_rank)}, all of them "
            "open, but the hard limit of open files (ulimit -Hn) leaves room for "
            f"{max(files, 0)}; raise either, or lower --tier-nvme-bytes."
        )
    return NvmeConfig(**values)


def resolve_object(explicit: Mapping[str, Any]) -> ObjectConfig | None:
    """Check the flags of the object tier; None without a URL. Raises ``ConfigError``; changes
    nothing."""
    if explicit.get("tier_object_url") is None:
        refuse_given(
            explicit, flags_of(ObjectConfig), "needs --tier-object-url; pass it, or drop this"
        )
        return None
    require("--tier-object-url", "obstore")
    config = ObjectConfig(**values_of(ObjectConfig, explicit))
    if not config.url.startswith("s3://"):
        return config
    # What S3 would refuse at the first write, or what would be ignored.
    algorithm = os.environ.get("AWS_SERVER_SIDE_ENCRYPTION", "")
    if algorithm and algorithm not in _ENCRYPTIONS:
        raise ConfigError(
            f"AWS_SERVER_SIDE_ENCRYPTION={algorithm} is unknown; set it to one of "
            f"{', '.join(_ENCRYPTIONS)}, or unset it for what the bucket says."
        )
    if os.environ.get("AWS_SSE_KMS_KEY_ID") and algorithm not in _NAMING_A_KEY:
        raise ConfigError(
            "AWS_SSE_KMS_KEY_ID needs AWS_SERVER_SIDE_ENCRYPTION=aws:kms beside it, or no page "
            "would be encrypted with that key; set it, or unset the key."
        )
    return config


def _resolve_request_log(explicit: Mapping[str, Any]) -> RequestLogConfig | None:
    values = values_of(RequestLogConfig, explicit)
    if "path" not in values:
        flags = flags_of(RequestLogConfig)
        refuse_given(explicit, flags, "needs --tier-log-requests; add it or drop this")
        return None
    pp_size = explicit.get("pp_size") or 1
    if pp_size > 1:  # whose stages plan no loads, so nobody knows a request's story
        raise ConfigError(
            f"--tier-log-requests {values['path']} has no meaning with --pp-size {pp_size}; drop "
            "one of them."
        )
    return RequestLogConfig(**values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _existing_parent(path: Path) -> Path:
    while not os.path.exists(path):  # nor one that may not be looked at
        path = path.parent
    return path


def _held_bytes(directory: Path) -> int:
    """Return the bytes that an earlier run's regions take; they count against the same cap."""
    try:
        return sum(file.stat().st_blocks * 512 for file in directory.glob("shard-*/region-*.kv"))
    except OSError:
        return 0


def resolve_transfer(explicit: Mapping[str, Any]) -> TransferConfig | None:
    """Return the transfer settings of a prefill or decode instance; None for any other server.
    Raises ``ConfigError``; the keys are read, nothing is written.

    SGLang's transfer backends need RDMA in practice and ``mooncake`` is its default; here ``zmq``
    is, because it runs anywhere.
    """
    role = explicit.get("disaggregation_mode")
    backend = explicit.get("disaggregation_transfer_backend", TRANSFER_BACKEND)
    if role not in ROLES or backend != TRANSFER_BACKEND:
        refuse_given(
            explicit,
            flags_of(TransferConfig),
            "is for --disaggregation-mode prefill or decode with "
            f"--disaggregation-transfer-backend {TRANSFER_BACKEND}; drop it, or add those",
        )
        return None
    workers = explicit.get("tokenizer_worker_num") or 1
    if workers > 1:
        raise ConfigError(
            f"--tokenizer-worker-num {workers} cannot run with the {TRANSFER_BACKEND} transfer "
            "backend, because SGLang's tokenizer workers load no plugins; drop it."
        )
    values = values_of(TransferConfig, explicit)
    if "allowed_networks" in values:
        values["allowed_networks"] = parse_networks("--transfer-allow", values["allowed_networks"])
    config = TransferConfig(**values)
    if config.encrypt_data and config.keys_directory is None:
        raise ConfigError(
            "--transfer-encrypt all needs --transfer-keys; make keys with sglang-tiered keygen."
        )
    sums = "disaggregation_enable_kv_checksum"
    if config.codec in LOSSY_CODEC_NAMES and explicit.get(sums):
        raise ConfigError(
            f"--transfer-codec {config.codec} rounds what --disaggregation-enable-kv-checksum sums "
            "before and after; drop one of them."
        )
    if config.keys_path is not None:
        for needed in ROLES if explicit.get("enable_pd_role_switch") else (role,):
            load_keys(config.keys_path, needed)
    return config


# ---- Sharing between servers ----


def resolve_peers(
    explicit: Mapping[str, Any], num_ranks: int, environment: Mapping[str, str] = os.environ
) -> PeerConfig | None:
    """Check the given flags; None where no other server is named. Raises ``ConfigError``, which
    never names a password; reads keys, and tries the ports, but keeps nothing."""
    url = explicit.get("tier_index") or environment.get(URL_VARIABLE) or None
    servers = explicit.get("tier_peers") or None
    if url is None and servers is None:
        others = {**explicit, "tier_index": None, "tier_peers": None}
        wanted = "needs --tier-peers or --tier-index; pass one, or drop this"
        refuse_given(others, flags_of(PeerConfig), wanted)
        return None
    if url is not None:
        require("--tier-index", "redis")
    pp_size = explicit.get("pp_size") or 1
    if pp_size > 1:
        flag = "--tier-index" if servers is None else "--tier-peers"
        raise ConfigError(
            f"{flag} cannot run with --pp-size {pp_size}, whose stages cannot erase what "
            "another server erased in the same step; drop one of them."
        )
    values = values_of(PeerConfig, explicit)
    host = _address(values.get("host") or explicit.get("host") or DEFAULT_HOST)
    port = values.get("port")
    if port is None and servers is not None:
        port = _own_port(servers)
    _try_ports(port, host, num_ranks)
    given = {"servers": servers, "url": url, "host": host, "port": port}
    config = PeerConfig(**{**values, **given})
    peer_settings(config, 0)
    if config.keys_directory is not None:
        load_keys(Path(config.keys_directory), PEER)
    return config


def _own_port(servers: str) -> int:
    """The port that all servers have. Raises ``ConfigError`` where they have several."""
    ports = {target.port for target in parse_targets(servers)}
    if len(ports) > 1:
        raise ConfigError(
            "--tier-peers names servers of several ports, so the others would not know this one's; "
            "pass --tier-peer-port."
        )
    return ports.pop()


def exposure(config: PeerConfig | None) -> str | None:
    """Return a sentence for the operator if other machines can share without keys."""
    if config is None or config.keys_directory is not None:
        return None
    url = config.url
    is_local = url is None or url.startswith("unix:") or is_loopback_url(url)
    if is_loopback(config.host) and is_local:
        return None
    redis = "" if url is None else ", and anyone who can write to the Redis,"
    both = "this port" if url is None else "both"
    return (
        f"pages are shared without --tier-peer-keys: anyone who reaches {config.host} can erase "
        f"pages here and read those whose keys it knows, and who is on the way{redis} can make "
        f"this server use forged ones; pass --tier-peer-keys, or let only these servers reach "
        f"{both}."
    )


def _address(host: str) -> str:
    """Resolve a name to an address, because ZeroMQ binds no names."""
    family = socket.AF_INET6 if ":" in host else socket.AF_UNSPEC
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--tier-peer-host {host} is no host that this machine knows ({error.strerror}); pass "
            "an address of it."
        ) from error
    return str(found[0][4][0])


def _try_ports(first: int | None, host: str, num_ranks: int) -> None:
    """Raise ``ConfigError`` unless this machine can listen on a port for each rank."""
    last = MAX_PORT - num_ranks + 1
    if first is not None and first > last:
        raise ConfigError(f"--tier-peer-port {first} must be at most {last}; drop it for any.")
    try:
        for port in (0,) if first is None else range(first, first + num_ranks):
            try_port("--tier-peer-port", host, port, "pass another, or drop it for any free one.")
    except OSError as error:
        raise ConfigError(
            f"--tier-peer-host {host} cannot be listened on ({error.strerror}); pass an address of "
            "this machine."
        ) from error
