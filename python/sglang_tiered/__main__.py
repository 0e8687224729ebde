"""``sglang-tiered``, which is ``python -m sglang_tiered``: the commands of this package, and what
is installed beside it; ``sglang-tiered NAME`` runs one.

What is installed is read from the metadata that pip leaves. Nothing of it is imported, so that this
works where nothing is installed.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import runpy
import sys
from dataclasses import dataclass

import sglang_tiered
from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import note, print_lines, run_program

_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_NOT_FOR_USERS = ("all", "dev")  # the sum of the others, and what only a checkout needs
_DISTRIBUTIONS = {"zmq": "pyzmq"}  # of the others, the name of the module says it
_OURS = "sglang-tiered"


PROGRAM = "sglang-tiered"
OPTIONS = {
    "--help": "this list; after a command, what that command takes",
    "--version": "versions for a bug report, and which packages are missing",
}


def version_lines() -> list[str]:
    """What a bug report has to say: this package, SGLang and torch, Python, and what is missing."""
    required = {name: line for name, extra, line in _requirements() if extra is None}
    wanted = required.get("sglang", "")[len("sglang") :]
    bound = f" (required: {wanted})" if wanted else ""
    lines = [
        f"{_OURS} {sglang_tiered.__version__}",
        f"sglang {_version('sglang') or 'is missing'}{bound}",
        f"torch {_version('torch') or 'is missing'}",
        f"Python {platform.python_version()}, {' '.join(platform.libc_ver())}, "
        f"{platform.machine()}",
    ]
    if not required:
        return [*lines, "missing: unknown, as no metadata of this package is installed"]
    by_extra = missing_requirements()
    if not by_extra:
        return [*lines, "missing: nothing"]
    return [
        *lines,
        *(
            f"missing{'' if extra is None else f' for the extra {extra}'}: {', '.join(names)}; "
            f"{install_command(extra)}"
            for extra, names in by_extra.items()
        ),
    ]


def missing_requirements() -> dict[str | None, list[str]]:
    """Names of required packages that are not installed, by the extra that asks for them; None is
    what the package itself requires. Empty where nothing is missing."""
    missing: dict[str | None, list[str]] = {}
    for name, extra, _ in _requirements():
        if _version(name) is None:
            missing.setdefault(extra, []).append(name)
    return missing


def requirement_of(module: str) -> str | None:
    """The package, required without any extra, that has this module; None if there is none."""
    top = module.partition(".")[0]
    name = _normal(_DISTRIBUTIONS.get(top, top))
    return next((one for one, extra, _ in _requirements() if one == name and extra is None), None)


def install_command(extra: str | None = None) -> str:
    """What installs what is missing: pip keeps the package itself, which it finds installed."""
    return f"pip install {_OURS}" if extra is None else f"pip install '{_OURS}[{extra}]'"


def _requirements() -> list[tuple[str, str | None, str]]:
    """Name, extra or None, and the requirement as it stands, without its marker."""
    try:
        lines = importlib.metadata.requires(_OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        name, extra = _NAME.match(requirement), _EXTRA.search(marker)
        if name is not None and not (extra is not None and extra[1] in _NOT_FOR_USERS):
            found.append((_normal(name[0]), None if extra is None else extra[1], requirement))
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Command:
    """``purpose``: what it is for; where a command has commands of its own, they are listed after
    the colon. ``module`` is run as ``python -m`` runs it, and its ``make_parser`` gives the command
    line, for completion."""

    purpose: str
    module: str


COMMANDS = {
    "serve": Command(
        "start SGLang's server with the tiers below its radix cache",
        "sglang_tiered.launch_server",
    ),
    "demo": Command(
        "what the tiers do, in about two minutes, with a small model",
        "sglang_tiered.demo.command",
    ),
    "route": Command(
        "the front of a cluster, by Envoy: serve",
        "sglang_tiered.route.cli",
    ),
    "store": Command(
        "look into a tier's store: stat, verify, dump, gc",
        "sglang_tiered.tools.store.cli",
    ),
    "explain": Command(
        "why a request was slow, from the file of --tier-log-requests",
        "sglang_tiered.tools.explain",
    ),
    "cluster": Command(
        "plan a cluster of servers: plan, published",
        "sglang_tiered_lab.cluster.cli",
    ),
    "trace": Command(
        "recorded workloads: stat, convert, scale, replay, generate",
        "sglang_tiered_lab.trace.cli",
    ),
    "keygen": Command(
        "make the keys of a handoff, and of servers that share pages",
        "sglang_tiered.tools.keygen",
    ),
    "completion": Command(
        "a shell's script that completes all of this",
        "sglang_tiered.completion",
    ),
}
"""By name, in the order of ``--help``. One row adds a command."""


def main() -> int:
    """Run the command that the command line names. Returns the exit code of a list of them, or of a
    command whose packages are missing."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        return run_program(lambda: _answer(name))
    del sys.argv[1]
    try:
        # As ``python -m`` would, so that processes which the command spawns find it as their
        # parent's.
        runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = requirement_of(error.name or "")
        if package is None:  # of a package that is there, or ours: a fault, not an installation
            raise
        note(
            f"{PROGRAM} {name} needs the package {package}, which is not installed; "
            f"{install_command()} installs all that is missing."
        )
        return 2
    return 0


def _answer(name: str) -> int:
    if name in ("-V", "--version"):
        print_lines(version_lines())
        return 0
    if name not in ("-h", "--help"):
        raise ConfigError(f"{name} is no command; {PROGRAM} --help lists what there is.")
    rows = {f"{PROGRAM} {one}": command.purpose for one, command in COMMANDS.items()}
    rows |= {f"{PROGRAM} {option}": purpose for option, purpose in OPTIONS.items()}
    width = max(map(len, rows))
    print_lines(f"{row:{width}}  {purpose}" for row, purpose in rows.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
