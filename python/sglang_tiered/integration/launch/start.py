"""What a server and an in-process ``Engine`` do alike before SGLang starts: prepare the process,
refuse what cannot work, and claim the tier directory."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import TieredConfig, TierMode, cache_directory
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration import compat
from sglang_tiered.integration.storage import machine_budget, shards
from sglang_tiered.loopback import ask_loopback_directly
from sglang_tiered.storage.region import directory as store_directory
from sglang_tiered.storage.region.directory import DirectoryLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from sglang_tiered.integration.launch.resolve import Resolved


MAX_FAULT_THREADS = 8

LOCK_TIMEOUT_S = 3.0
"""A server that was just killed may take a moment to let go of its directory."""


def prepare() -> None:
    """Prepare this process for SGLang, as its own launcher does before it parses, and check that it
    is one that can be run here. Raises ``ConfigError``."""
    compat.check_version()
    ask_loopback_directly()  # SGLang asks its own server, too
    _prepare_caches()
    from sglang_tiered.integration.launch import accelerator

    problem = accelerator.problem()
    if problem is not None:
        raise ConfigError(problem)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    compat.check_signatures()
    compat.check_imports()
    if not accelerator.is_available():
        from sglang_tiered.integration.cpu import short_conv

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


def _use_huge_pages() -> None:
    """Have SGLang make its host pool of private memory, which may be huge pages. By default the
    pool is shared memory of 4 KiB pages: a disk then moves each page of KV in hundreds of pieces.
    Reads of 2 MiB reached 1.24 GB/s on a virtual disk, and 3.07 into huge pages. SGLang's own
    threads fault such memory in."""
    threads = min(MAX_FAULT_THREADS, len(os.sched_getaffinity(0)))
    os.environ.setdefault("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", str(threads))


def resolve(explicit: Mapping[str, Any], arguments: Sequence[str]) -> Resolved:
    """Check what was given and complete it. Sets the environment of what is started. Raises
    ``ConfigError``; touches no tier."""
    import torch

    from sglang_tiered.integration.launch import resolve as resolution

    resolved = resolution.resolve(explicit, arguments, on_cpu=not torch.cuda.is_available())
    if resolved.config.mode is not TierMode.OFF:
        _use_huge_pages()
    if resolved.config.mode is TierMode.NVME:
        _build_page_hash()
    return resolved


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

    from sglang_tiered.integration.cpu import memory

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
