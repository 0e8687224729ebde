"""The command line of ``sglang-tiered completion``: a shell's script that completes commands, their
commands and every flag, SGLang's too. It is made once, as SGLang takes seconds to import."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import warnings
from typing import TYPE_CHECKING

from sglang_tiered.__main__ import COMMANDS, OPTIONS, PROGRAM
from sglang_tiered.flags import require
from sglang_tiered.tools.terminal import Parser, run_program

if TYPE_CHECKING:
    from collections.abc import Sequence


_DESCRIPTION = """\
Prints a script with which a shell completes the commands of this package, their
commands and every flag, those of SGLang's server too. It asks SGLang for them, which
takes ten seconds or so; a new version of either package wants a new script.
"""
_EPILOG = """\
examples:
  %(prog)s bash > ~/.local/share/bash-completion/completions/sglang-tiered
  %(prog)s zsh > ~/.zfunc/_sglang-tiered    # with fpath+=~/.zfunc before compinit

exit code:
  0  fine
  2  a command line or a package that cannot be used; one sentence says why
"""
_SHELLS = ("bash", "zsh")
_FILES = ("FILE", "MODEL_PATH", "PLACE", "TRACE")
_DIRECTORIES = ("DIR",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script. Returns the exit code."""
    return run_program(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = make_parser().parse_args(arguments)
    require("completion", "shtab")
    import shtab

    # SGLang's import warns, and may print, where only the script is to be printed.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(action="ignore"):
        whole = _whole_parser()
        _mark_paths(whole, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY})
        script = shtab.complete(whole, options.shell)
    print(script)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"{PROGRAM} completion",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS, help="whose script")
    return parser


def _whole_parser() -> argparse.ArgumentParser:
    """The parsers of all commands below one, as the list of commands stands above them."""
    whole = argparse.ArgumentParser(prog=PROGRAM)
    for option, purpose in OPTIONS.items():
        if option not in whole._option_string_actions:  # noqa: SLF001
            whole.add_argument(option, action="store_true", help=purpose)
    below = whole.add_subparsers()
    for name, command in COMMANDS.items():
        parser = importlib.import_module(command.module).make_parser()
        below.add_parser(name, help=command.purpose, parents=[parser], add_help=False)
    return whole


def _mark_paths(parser: argparse.ArgumentParser, completers: dict[str, object]) -> None:
    """Complete the names of files where an argument takes one, as its metavar says."""
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for below in action.choices.values():
                _mark_paths(below, completers)
        elif action.choices is None and isinstance(action.metavar, str):
            kind = "DIR" if action.metavar in _DIRECTORIES else "FILE"
            if action.metavar in (*_DIRECTORIES, *_FILES):
                action.complete = completers[kind]  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
