"""Output and exit codes of the command line tools: tables for people, JSON for programs, notes on
stderr."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from sglang_tiered.errors import ConfigError, TieredError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


_STOPPED = 130  # as a shell reports Ctrl-C


class Parser(argparse.ArgumentParser):
    """Answers a command line that it cannot accept with one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help tells what there is.")


def run_program(program: Callable[[], int]) -> int:
    """Run a command line program to its exit code. For what it cannot use it prints one sentence on
    stderr and returns 2; for Ctrl-C 130. It is silent when its output is no longer read."""
    code = _run(program)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _discard_output()
        if code == 0 and not isinstance(error, BrokenPipeError):
            note(f"the output cannot be written ({error.strerror}); write it elsewhere")
            code = 2
    return code


def _run(program: Callable[[], int]) -> int:
    try:
        try:
            return program()
        except SystemExit as end:  # --help
            return int(end.code or 0)
    except BrokenPipeError:  # the reader has all it wanted
        return 0
    except KeyboardInterrupt:
        note("stopped")
        return _STOPPED
    except TieredError as error:
        note(str(error))
        return 2
    except OSError as error:
        where = "the output or a file" if error.filename is None else error.filename
        what = "removed while this ran" if error.errno == errno.ENOENT else error.strerror
        note(f"{where} cannot be used ({what}); check permissions, limits and free space")
        return 2


def _discard_output() -> None:
    """Keep buffered output from failing again when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def printable(text: str) -> str:
    """Escape control characters: names on disk may hold any, and a terminal must not obey them."""
    return text if text.isprintable() else ascii(text)


def write_json(report: object) -> None:
    print(json.dumps(report, indent=2))


def note(text: str) -> None:
    shown = "\n".join(map(printable, text.split("\n")))
    print(f"sglang-tiered: {shown}", file=sys.stderr)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table whose first ``left`` columns are names, the others figures."""
    table = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        names = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        print("  ".join((*names, *cells[left:])).rstrip())
