"""``sglang-tiered serve``, which is ``python -m sglang_tiered.launch_server``: SGLang's server with
the tiers below its radix cache.

Takes every flag of ``sglang.launch_server`` and the flags of ``config``.
Whatever cannot work is refused here, with one sentence and exit code 2, before a model is loaded
or a tier is touched.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shlex
import sys
import textwrap
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_tiered.errors import ConfigError, SchedulerRefused, TieredError
from sglang_tiered.flags import format_bytes
from sglang_tiered.integration import start
from sglang_tiered.tools.terminal import Parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.resolve import Resolved


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until it stops. Returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _collecting_nothing():
            resolved = _resolve(arguments)
        for note in resolved.notes:
            print(f"sglang-tiered: {note}", file=sys.stderr)
        with ExitStack() as held:
            start.claim_directory(resolved.config, held)
            resolved.config.to_environment()
            from sglang.srt.server_args import prepare_server_args
            from sglang.srt.utils import kill_process_tree

            held.callback(kill_process_tree, os.getpid(), include_parent=False)
            _run(prepare_server_args(resolved.sglang_arguments), resolved.config)
        return 0
    except KeyboardInterrupt:
        return 130  # as a shell says it; SGLang has stopped by then
    except SchedulerRefused:
        return 2
    except TieredError as error:
        print(f"sglang-tiered: {error}", file=sys.stderr)
        return 2


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """While SGLang is imported, of which nothing becomes garbage: looking for some takes two
    seconds. Later collections pass it by; one in a fork would copy all that it shares."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _resolve(arguments: list[str]) -> Resolved:
    parser = make_parser()
    from sglang_tiered.integration import resolve

    arguments = _with_configuration_file(parser, arguments)
    explicit = resolve.explicit_arguments(parser, arguments)
    start.check_ports(explicit)
    return resolve.resolve_here(explicit, arguments)


def make_parser() -> argparse.ArgumentParser:
    """SGLang's parser and ours at once, so that ``--help`` and errors know both."""
    start.prepare()
    from sglang.srt.server_args import ServerArgs

    from sglang_tiered.integration.resolve import add_tier_arguments

    parser = Parser(prog="sglang-tiered serve")
    ServerArgs.add_cli_args(parser)
    add_tier_arguments(parser)
    return parser


def _with_configuration_file(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """The arguments with those of the YAML file that ``--config`` names before them."""
    files = Parser(add_help=False)  # SGLang would ignore --config=FILE, and --conf FILE
    files.add_argument("--config", action="append", default=[])
    given, rest = files.parse_known_args(arguments)
    if not given.config:
        return arguments
    for file in given.config:
        _refuse_empty_settings(file)
    named = [word for file in given.config for word in ("--config", file)]
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    try:
        return list(ConfigArgumentMerger(parser).merge_config_with_args([*named, *rest]))
    except Exception as error:  # the file, its YAML or its flags
        text = textwrap.shorten(str(error), 300, placeholder=" ...").rstrip(".")
        raise ConfigError(f"--config cannot be used: {text}.") from error


def _refuse_empty_settings(file: str) -> None:
    """Raise ``ConfigError`` for a key without a value: SGLang takes it for the word None, which
    then opens a server whose ``api-key`` was forgotten."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return  # SGLang reads it again, and says what is wrong
    for key, value in content.items() if isinstance(content, dict) else ():
        if value is None or (isinstance(value, list) and None in value):
            raise ConfigError(
                f"{key} has no value in {file} of --config; write one, or drop the line."
            )


def _run(server_args: Any, config: TieredConfig) -> None:
    """SGLang's ``run_server``, with our banner once the server answers where it is HTTP."""
    # Asked of the raw record: SGLang completes it for these modes before it resolves it.
    special = ("encoder_only", "smg_grpc_mode", "grpc_mode", "use_ray")
    if any(getattr(server_args, name) for name in special):
        from sglang.launch_server import run_server

        if not server_args.encoder_only:  # which has neither a tree nor tiers
            server_args.tokenizer_path = server_args.tokenizer_path or server_args.model_path
            _, config = start.check(server_args, config)
            config.to_environment()
            start.remove_other_shards(config)
        run_server(server_args)
        return
    with _collecting_nothing():
        from sglang.srt.entrypoints.http_server import app, get_global_state, launch_server

        from sglang_tiered.integration.admin.costs import CostBoard
        from sglang_tiered.integration.admin.http_api import add_routes
        from sglang_tiered.integration.admin.role_switch import take_orders
        from sglang_tiered.integration.platforms import processes

        resolved, config = start.check(server_args, config)

    def announce() -> None:
        print(banner(resolved, config, get_global_state().scheduler_info), flush=True)

    config.to_environment()  # again: a model may change what was given
    start.remove_other_shards(config)
    if resolved.numa_node is None:  # SGLang binds spawned processes only
        processes.fork_from_here(resolved.device)
    with CostBoard.of_server(resolved) as board:
        board.to_environment()
        has_key = bool(resolved.api_key or resolved.admin_api_key)
        add_routes(app, board, config, has_key=has_key)
        take_orders(board.boot)
        try:
            launch_server(server_args, launch_callback=announce)
        finally:
            # It would take the children that are ended next for crashed ones, and say so.
            manager = getattr(get_global_state(), "tokenizer_manager", None)
            watchdog = getattr(manager, "_subprocess_watchdog", None)
            if watchdog is not None:
                watchdog.stop()


def banner(server_args: Any, config: TieredConfig, scheduler_info: Mapping[str, Any]) -> str:
    """Address, tiers with what they can hold and do hold, and a first request to try (one half of
    prefill and decode serves none by itself). ``scheduler_info``: what the first scheduler said at
    its start (``Scheduler.get_init_info`` and our hook on it). Bytes are those of all ranks, tokens
    those of all replicas."""
    from sglang_tiered.integration.hooks import TIERS_INFO

    address = server_args.url()  # loopback for what stands for all addresses
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
        nbytes: int | None = config.nvme.capacity_bytes
        if config.nvme.budget_directory is not None:
            place += f", of {format_bytes(config.nvme.capacity_bytes)} that servers share"
            nbytes = None  # what it has now
        lines.append(line("nvme", nbytes, place))
    if config.object is not None:
        place = f"at {config.object.url}, shared"
        lines.append(line("object", config.object.capacity_bytes, place))
    if config.peers is not None:
        lines.append(f"  peers   {config.peers.shown}")
    if server_args.disaggregation_mode in ("prefill", "decode"):
        other = "decode" if server_args.disaggregation_mode == "prefill" else "prefill"
        return "\n".join([*lines, f"send requests to a router in front of it and of {other}", ""])
    body = json.dumps(
        {
            "model": server_args.served_model_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
    )
    # Of what brackets a URL has, curl and the shell make a pattern.
    url, kind = shlex.quote(f"{address}/v1/chat/completions"), "-H 'Content-Type: application/json'"
    curl = f"curl -sS{'g' * ('[' in url)} {url} {kind} -d {shlex.quote(body)}"
    return "\n".join([*lines, "try:", f"  {curl}", ""])


def end_process(code: int) -> NoReturn:
    """End this process as Python does, but do not clear its modules away. Triton's library takes
    those that it finds then for leaks, and reports forty lines of them below a clean end."""
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
