"""``python -m sglang_tiered.launch_server``: SGLang's server with the tiers below its radix cache.

Takes every flag of ``sglang.launch_server`` and the flags of ``config``.
Whatever cannot work is refused here, with one sentence and exit code 2, before a model is loaded
or a tier is touched.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import socket
import sys
import textwrap
import traceback
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_tiered.config import TieredConfig, TierMode, cache_directory, format_bytes
from sglang_tiered.errors import ConfigError, SchedulerRefused, TieredError
from sglang_tiered.integration import compat
from sglang_tiered.storage.region import directory as store_directory
from sglang_tiered.storage.region.directory import DirectoryLock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang_tiered.integration.launch.resolve import Resolved

__all__ = ["main"]

LOCK_TIMEOUT_S = 3.0
"""A server that was just killed may take a moment to let go of its directory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until it stops. Returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        compat.check_version()
        _prepare_caches()
        resolved = _resolve(arguments)
        for note in resolved.notes:
            print(f"sglang-tiered: {note}", file=sys.stderr)
        with ExitStack() as held:
            _claim_directory(resolved.config, held)
            resolved.config.to_environment()
            return _serve(resolved)
    except KeyboardInterrupt:
        return 130  # as a shell says it; SGLang has stopped by then
    except SchedulerRefused:
        return 2
    except TieredError as error:
        print(f"sglang-tiered: {error}", file=sys.stderr)
        return 2


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


def _resolve(arguments: list[str]) -> Resolved:
    """Parse with SGLang's parser and ours at once, so that ``--help`` and errors know both."""
    from sglang_tiered.integration.launch import accelerator

    problem = accelerator.problem()
    if problem is not None:
        raise ConfigError(problem)
    _prepare_sglang()
    import torch
    from sglang.srt.server_args import ServerArgs

    from sglang_tiered.integration.launch import flags, resolve

    compat.check_signatures()
    parser = _Parser(prog="python -m sglang_tiered.launch_server")
    ServerArgs.add_cli_args(parser)
    flags.add_tier_arguments(parser)
    flags.refuse_settings(arguments)
    arguments = _with_configuration_file(parser, arguments)
    flags.refuse_gone_flags(arguments)
    arguments = flags.join_tier_values(arguments)
    explicit = resolve.explicit_arguments(parser, arguments)
    if not explicit.get("node_rank"):  # only the first node of several listens
        _check_address(explicit.get("host", "127.0.0.1"), explicit.get("port", 30000))
    on_cpu = not torch.cuda.is_available()
    resolved = resolve.resolve(explicit, arguments, on_cpu=on_cpu)
    if resolved.config.mode is TierMode.NVME:
        problem = _page_hash_problem()
        if problem is not None:
            return resolve.resolve_without_nvme(explicit, arguments, on_cpu=on_cpu, problem=problem)
    return resolved


def _with_configuration_file(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """The arguments with those of the YAML file that ``--config`` names before them."""
    arguments = [
        part
        for argument in arguments  # SGLang would ignore the joined form
        for part in (argument.split("=", 1) if argument.startswith("--config=") else [argument])
    ]
    if "--config" not in arguments:
        return arguments
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    from sglang_tiered.integration.launch import flags

    try:
        merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    except Exception as error:  # the file, its YAML or its flags
        text = textwrap.shorten(str(error), 300, placeholder=" ...").rstrip(".")
        raise ConfigError(f"--config cannot be used: {text}.") from error
    return flags.as_words(merged)


def _check_address(host: str, port: int) -> None:
    """SGLang binds only once the model is loaded, and hangs when the port is taken."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is not a port from 0 to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        # Anything else about the address is SGLang's to judge: the host may be a name.
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port} is in use on {host}; stop what listens there or pass another "
                "--port."
            ) from error


class _Parser(argparse.ArgumentParser):
    """Answers a command line it cannot take with one sentence, not with 500 flags of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists every flag.")


def _prepare_sglang() -> None:
    """What ``sglang.launch_server`` does before it parses."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from sglang.srt.plugins import load_plugins

    load_plugins()


def _claim_directory(config: TieredConfig, held: ExitStack) -> None:
    """Check, lock and complete the tier directory; the lock lives as long as this process."""
    if config.nvme is None:
        return
    path = Path(config.nvme.directory)
    store_directory.refuse_strangers(path)
    if store_directory.inspect(path) is store_directory.DirectoryState.ABSENT:
        store_directory.prepare(path)
    held.enter_context(DirectoryLock(path, timeout_s=LOCK_TIMEOUT_S))
    store_directory.prepare(path)


def _remove_other_shards(config: TieredConfig) -> None:
    """Remove what no server of these parallel sizes opens. The caller holds the directory, and has
    refused what it can refuse: a mistyped command must cost nothing that is stored."""
    if config.nvme is None:
        return
    from sglang_tiered.integration.storage.shards import has_geometry

    path = Path(config.nvme.directory)

    def serves(name: str) -> bool:
        return has_geometry(
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


def _serve(resolved: Resolved) -> int:
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(resolved.sglang_arguments)
    try:
        _run(server_args, resolved.config)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _run(server_args: Any, config: TieredConfig) -> None:
    """SGLang's ``run_server``, with our banner once the server answers where it is HTTP."""
    # Asked of the raw record: SGLang completes it for these modes before it resolves it.
    special = ("encoder_only", "smg_grpc_mode", "grpc_mode", "use_ray")
    if any(getattr(server_args, name) for name in special):
        from sglang.launch_server import run_server

        _remove_other_shards(config)
        run_server(server_args)
        return
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.entrypoints.http_server import app, get_global_state, launch_server
    from sglang.srt.runtime_context import num_dp_ranks_of

    from sglang_tiered.integration.admin.cost_board import CostBoard
    from sglang_tiered.integration.admin.http_api import add_routes
    from sglang_tiered.integration.cpu import memory
    from sglang_tiered.integration.launch.model_support import check_model

    _complete(server_args)
    resolved = resolving_view(server_args)
    check_model(resolved, config)
    if resolved.device == "cpu":
        needed = memory.working_set(resolved, config.host_bytes)
        memory.check_memory(needed, memory.allocatable_bytes())

    def announce() -> None:
        print(banner(resolved, config, get_global_state().scheduler_info), flush=True)

    _remove_other_shards(config)
    with CostBoard.create(num_dp_ranks_of(resolved)) as board:
        board.to_environment()
        add_routes(app, board, config)
        launch_server(server_args, launch_callback=announce)


def _complete(server_args: Any) -> None:
    """Let SGLang judge the command line; what it refuses is one sentence too."""
    try:
        server_args.resolve_once()
    except (AssertionError, NotImplementedError, OSError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = textwrap.shorten(str(error) or type(error).__name__, 400, placeholder=" ...")
        raise ConfigError(
            f"SGLang refuses this command line: {text.rstrip('.')} "
            f"({Path(where.filename).name}:{where.lineno})."
        ) from error


def _page_hash_problem() -> str | None:
    """Build SGLang's page hash extension now, or say why it cannot be built.

    SGLang builds it at the first prefill, where it would stall a request for seconds, and where
    a missing compiler would end the scheduler.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        get_hash_str([0], page_size=1)
    except Exception as error:
        # Whatever the build tools raised: the server can run without this tier.
        return textwrap.shorten(str(error.__cause__ or error), width=100, placeholder=" ...")
    return None


def banner(server_args: Any, config: TieredConfig, scheduler_info: Mapping[str, Any]) -> str:
    """Address, tiers with what they can hold and do hold, and a first request to try (one half of
    prefill and decode serves none by itself). ``scheduler_info``: what the first scheduler said at
    its start (``Scheduler.get_init_info`` and our hook on it). Bytes are those of all ranks, tokens
    those of all replicas."""
    from sglang_tiered.integration.hooks import TIERS_INFO

    host = "127.0.0.1" if server_args.host in ("0.0.0.0", "::") else server_args.host
    address = f"http://{host}:{server_args.port}"
    tiers = scheduler_info.get(TIERS_INFO, {})
    num_replicas = max(1, config.num_ranks // (config.tp_size * config.pp_size))

    def line(name: str, nbytes: int | None = None, *more: str) -> str:
        """One tier; ``nbytes`` where its size is configured, ``more`` clauses behind it."""
        tier = tiers.get(name, {})
        num_tokens = tier.get("capacity_tokens") or scheduler_info["max_total_num_tokens"]
        nbytes = tier.get("capacity_bytes", 0) * config.num_ranks if nbytes is None else nbytes
        held = tier.get("held_tokens", 0) * num_replicas
        size = f"{num_tokens * num_replicas:,} tokens" if tier or name == "device" else ""
        room = " in ".join(filter(None, (size, format_bytes(nbytes) if nbytes else "")))
        return (
            f"  {name:7} " + " ".join((room, *more)) + (f", {held:,} tokens held" if held else "")
        )

    lines = ["", f"sglang-tiered is ready at {address}", line("device")]
    if "host" in tiers:
        lines.append(line("host"))
    if config.nvme is not None:
        limit = config.nvme.writes_per_day
        writes = "" if limit is None else f", at most {format_bytes(limit)} written per day"
        place = f"at {config.nvme.directory}{writes}"
        lines.append(line("nvme", config.nvme.capacity_bytes, place))
    if config.object is not None:
        place = f"at {config.object.shown_url}, shared"
        lines.append(line("object", config.object.capacity_bytes, place))
    if config.index is not None:
        lines.append(f"  peers   those in the index at {config.index.shown_url}")
    if server_args.disaggregation_mode in ("prefill", "decode"):
        other = "decode" if server_args.disaggregation_mode == "prefill" else "prefill"
        return "\n".join([*lines, f"send requests to a router in front of it and of {other}", ""])
    body = json.dumps(
        {
            "model": server_args.served_model_name,
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 32,
        }
    )
    url, kind = f"{address}/v1/chat/completions", "-H 'Content-Type: application/json'"
    lines += ["try:", f"  curl -s {url} {kind} -d {shlex.quote(body)}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
