"""What a server and an in-process ``Engine`` do alike before SGLang starts: prepare the process,
refuse what cannot work, and claim the tier directory.

Ports that are in use are refused before a model is loaded. SGLang binds its own late, and where one
is taken it hangs, prints a traceback, or goes on. A second prefill server with the same bootstrap
port registers its ranks over those of the first.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import textwrap
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import TieredConfig, TierMode, cache_directory
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration import compat, plugin
from sglang_tiered.integration.storage import machine_budget, shards
from sglang_tiered.integration.storage.shards import sizes_of
from sglang_tiered.loopback import ask_loopback_directly
from sglang_tiered.storage.region import directory as store_directory
from sglang_tiered.storage.region.directory import DirectoryLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import ExitStack


ANYWHERE = "0.0.0.0"

LOCK_TIMEOUT_S = 3.0
"""A server that was just killed may take a moment to let go of its directory."""


def prepare() -> None:
    """Prepare this process for SGLang, as its own launcher does before it parses, and check that it
    is one that can be run here. Raises ``ConfigError``."""
    compat.check_version()
    ask_loopback_directly()  # SGLang asks its own server, too
    _prepare_caches()
    problem = plugin.accelerator_problem()
    if problem is not None:
        raise ConfigError(problem)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    compat.check_signatures()
    compat.check_imports()
    if not plugin.has_accelerator():
        from sglang_tiered.integration.platforms import short_conv

        compat.check_signatures(short_conv.SIGNATURES)


def _prepare_caches() -> None:
    """SGLang compiles into its cache while it is imported, and looks for it under the home
    directory only; a service's home may not be writable."""
    text = os.environ.setdefault("SGLANG_CACHE_DIR", str(cache_directory() / "sglang"))
    place = Path(text).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written ({error.strerror}), and SGLang keeps there what it "
            "compiles; set XDG_CACHE_HOME or SGLANG_CACHE_DIR to a folder that can."
        ) from error


def claim_directory(config: TieredConfig, held: ExitStack) -> None:
    """Check, lock and complete the tier directory; the lock lives as long as this process. The file
    of ``--tier-log-requests`` is checked with it."""
    if config.nvme is None:
        return
    if config.request_log is not None:
        config.request_log.check()
    path = Path(config.nvme.directory)
    machine_budget.check_budget(config)
    store_directory.refuse_strangers(path)
    if store_directory.inspect(path) is store_directory.DirectoryState.ABSENT:
        store_directory.prepare(path)
    lock = held.enter_context(DirectoryLock(path, timeout_s=LOCK_TIMEOUT_S))
    os.register_at_fork(after_in_child=lock.release)  # a fork may outlive this process
    store_directory.prepare(path)


def remove_other_shards(config: TieredConfig) -> None:
    """Remove what no server of these parallel sizes opens. The caller holds the directory, and has
    refused what it can refuse: a mistyped command must cost nothing that is stored."""
    if config.nvme is None:
        return
    path = Path(config.nvme.directory)

    def serves(name: str) -> bool:
        return shards.has_geometry(
            name,
            num_ranks=config.num_ranks,
            tp_size=config.tp_size,
            pp_size=config.pp_size,
            dp_size=config.dp_size,
        )

    for name in store_directory.remove_shards(path, keep=serves, timeout_s=LOCK_TIMEOUT_S):
        print(
            f"sglang-tiered: removed shard {name} of {path}, whose pages only a server with other "
            "parallel sizes could read.",
            file=sys.stderr,
        )


def check(server_args: Any, config: TieredConfig) -> tuple[Any, TieredConfig]:
    """Return SGLang's settings as it resolves them, and the configuration with the sizes that they
    say. Raises ``ConfigError`` for what SGLang, the model or this machine refuses."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    from sglang_tiered.integration.platforms import memory

    try:
        server_args.resolve_once()
    except (AssertionError, NotImplementedError, OSError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = textwrap.shorten(str(error) or type(error).__name__, 400, placeholder=" ...")
        raise ConfigError(
            f"SGLang refuses these arguments: {text.rstrip('.')} "
            f"({Path(where.filename).name}:{where.lineno})."
        ) from error
    settings = resolving_view(server_args)
    is_off = config.mode is TierMode.OFF
    for sentence in () if is_off else refusals(settings, config, model_config_of(settings)):
        raise ConfigError(sentence)
    if settings.device == "cpu":
        needed = memory.working_set(settings, config.host_bytes)
        there = memory.allocatable_bytes() - (config.nvme.memory_bytes if config.nvme else 0)
        memory.check_memory(needed, max(0, there))
    return settings, config if is_off else shards.of_settings(settings).put_into(config)


def refusals(server_args: Any, config: TieredConfig, model: Any) -> Iterator[str]:
    """Yield why a model or flags would run without tiers, which the operator who asked for them
    would not notice, or answer wrongly. Everything HiCache serves is served. ``server_args`` is
    SGLang's resolved view, ``model`` its ``ModelConfig``."""
    architecture, is_hybrid_swa = model.hf_config.architectures[0], model.is_hybrid_swa
    # A decode server of a disaggregated pair has no radix cache by default, and that is fine.
    if server_args.disable_radix_cache and server_args.disaggregation_mode != "decode":
        yield (
            f"SGLang turns its radix cache off for {architecture} under these flags, and the "
            "tiers hold what the radix cache does; pass --tier-mode off."
        )
    if is_hybrid_swa and model.full_attention_layer_ids == []:
        yield (
            f"every layer of {architecture} has a sliding window, and SGLang caches such a model "
            "in device memory only; pass --tier-mode off."
        )
    if config.nvme is not None and config.nvme.checkpoint_tokens is not None:
        policy = server_args.hicache_write_policy
        # Their trees would drop a window that is in use, or take a draft's row for the answer's.
        for reason, is_so in (
            ("a sliding window", is_hybrid_swa),
            ("--speculative-algorithm", server_args.speculative_algorithm is not None),
            ("--strip-thinking-cache", server_args.strip_thinking_cache),
            ("--pp-size", server_args.pp_size > 1),
            (f"--hicache-write-policy {policy}", policy != "write_through"),
        ):
            if is_so:
                yield (
                    f"--tier-checkpoint-tokens keeps nothing of a running answer with {reason}; "
                    "drop either."
                )
    if server_args.tokenizer_worker_num > 1:
        yield (
            f"--tokenizer-worker-num {server_args.tokenizer_worker_num} leaves the server without "
            "the /tier calls, ids of conversations and checks of image hashes, because SGLang's "
            "tokenizer workers load no plugins; drop it, or pass --tier-mode off."
        )
    # SGLang keeps these rows beside the KV, by device slot. A prefix that comes back from host
    # memory or NVMe gets other slots, with the rows of another prompt, and so does whoever finds it
    # on the device afterwards.
    for name in ("enable_return_routed_experts", "enable_return_indexer_topk"):
        if getattr(server_args, name):
            yield (
                f"--{name.replace('_', '-')} would answer with rows of other prompts where a "
                "prefix comes from a tier, because SGLang keeps them by place in device memory "
                "only; drop it, or pass --tier-mode off."
            )


# ---- Ports ----


def check_ports(explicit: Mapping[str, Any], *, serves_http: bool = True) -> None:
    """Raise ``ConfigError`` for a port of SGLang's that this process cannot bind, or is to bind
    twice. ``explicit``: the arguments that were given. Only the first node of several listens."""
    if explicit.get("node_rank"):
        return
    bound: dict[int, str] = {}
    for flag, host, port in _ports(explicit, serves_http):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{flag} {port} is not a port from 0 to 65535.")
        other = bound.setdefault(port, flag)
        if port and other != flag:
            raise ConfigError(f"{flag} {port} is the port of {other} too; pass another.")
        with suppress(OSError):  # the host may be a name, which SGLang judges
            try_port(flag, host, port, f"stop what listens there or pass another {flag}.")


def try_port(flag: str, host: str, port: int, way_out: str) -> None:
    """Raise ``ConfigError`` if something listens on the port, and ``OSError`` for an address that
    this machine does not have."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(f"{flag} {port} is in use on {host}; {way_out}") from error


def _ports(explicit: Mapping[str, Any], serves_http: bool) -> Iterator[tuple[str, str, int]]:
    """Flag, host and port of each port that SGLang will bind by its flags."""
    host, switches = explicit.get("host", "127.0.0.1"), explicit.get("enable_pd_role_switch")
    is_prefill = explicit.get("disaggregation_mode") == "prefill" or switches
    for name, where, is_bound, default in (  # of SGLang
        ("port", host, serves_http, 30000),
        ("disaggregation_bootstrap_port", host, is_prefill, 8998),
        ("encoder_bootstrap_port", host, explicit.get("language_only"), 8997),
        ("grpc_port", host, True, None),
        ("smg_http_sidecar_port", host, True, None),
        ("gated_launch_port", host, True, None),
        ("nccl_port", ANYWHERE, True, None),
    ):
        port = explicit.get(name, default)
        if is_bound and port is not None:
            yield "--" + name.replace("_", "-"), where, port
    yield from _event_ports(explicit)


def _event_ports(explicit: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """The ports of KV events, one for each replica. SGLang binds an address that is a wildcard and
    connects to any other; what it cannot read it refuses itself."""
    try:
        events = json.loads(explicit.get("kv_events_config") or "{}")
        if events.get("publisher") != "zmq":
            return
        for endpoint in (events.get("endpoint", "tcp://*:5557"), events.get("replay_endpoint")):
            address, _, port = (endpoint or "").removeprefix("tcp://").rpartition(":")
            if address in ("*", ANYWHERE):
                for replica in range(sizes_of(explicit).num_replicas):
                    yield "--kv-events-config", ANYWHERE, int(port) + replica
    except (AttributeError, TypeError, ValueError):
        return
