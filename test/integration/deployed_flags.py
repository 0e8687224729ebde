"""Judges the commands of ``deploy/`` by the parsers of the programs that they start."""

from __future__ import annotations

import functools
import re
import warnings
from typing import TYPE_CHECKING, Any

from deployed import is_shell

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import values_of
from sglang_tiered.route.cli import make_parser
from sglang_tiered.route.settings import RouteConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


LAUNCHER = ["python3", "-m", "sglang_tiered.launch_server"]
ROUTER = ["python3", "-m", "sglang_tiered", "route", "serve"]


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """As ``launch_server`` makes it. Loading SGLang takes ten seconds, once a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
        from sglang_tiered import launch_server

        return launch_server.make_parser()


def launcher_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """What a server's arguments set, with those of their ``--config``, by the names in Python; a
    model may still be missing. Raises ``ConfigError`` for a flag, a choice or a size that the
    server would refuse."""
    parser = _parser()
    from sglang_tiered import launch_server
    from sglang_tiered.config import NvmeConfig, TieredConfig, TransferConfig
    from sglang_tiered.integration.resolve import explicit_arguments
    from sglang_tiered.remote_config import ObjectConfig, PeerConfig

    with_model = ["--model-path", "any", *arguments]  # what follows replaces it
    merged = launch_server._with_configuration_file(parser, with_model)
    explicit = explicit_arguments(parser, merged)
    for config in (TieredConfig, NvmeConfig, ObjectConfig, PeerConfig, TransferConfig):
        values_of(config, explicit)
    return explicit


def ports_of(name: str, words: list[str]) -> list[int]:
    """The ports that a command of a service listens at, in order."""
    text = " ".join(words)
    found = [int(port) for port in re.findall(r"--[\w-]*port[= ](\d+)", text)]
    found += [int(port) for port in re.findall(r"tcp://0\.0\.0\.0:(\d+)", text)]
    if name in ("router", "picker"):
        found = [found[0] + place for place in range("--envoy=off" in words, 3)]
    return sorted(found)


def problem_of_command(words: list[str]) -> str:
    """Why the program that a command names would refuse it; empty if it would not."""
    if is_shell(words):
        return ""  # run, in test_deploy.py
    if words[:3] == LAUNCHER:
        try:
            launcher_flags(words[3:])
        except ConfigError as error:
            return str(error)
        return ""
    if words[:5] == ROUTER:
        try:
            options = make_parser().parse_args(words[4:])
            RouteConfig(**values_of(RouteConfig, vars(options)))
        except ConfigError as error:
            return str(error)
        return ""
    return f"nobody judges the command {words[:3]}"
