"""Prints the rooms of the source, each with its purpose; of a room that is named, its files too.

The purpose is the first sentence of a module's docstring, so it cannot become stale apart from it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
SOURCES = tuple(ROOT / name for name in ("python", "kernels"))
WIDTH = 46


def purpose(path: Path) -> str:
    """The first sentence of a module; empty where it has no docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


def rooms(source: Path) -> Iterator[Path]:
    """Every folder with Python files below a source folder, in order of its name."""
    yield from sorted({path.parent for path in source.rglob("*.py")})


def files(room: Path) -> list[Path]:
    """The files of a room; its ``__init__.py`` tells of the room."""
    return sorted(path for path in room.glob("*.py") if path.name != "__init__.py")


def lines(wanted: str | None) -> Iterator[str]:
    """All rooms, or one with the rooms and files in it; nothing if it is not there."""
    for source in SOURCES:
        for room in rooms(source):
            name = str(room.relative_to(source))
            inside = wanted is not None and f"/{name}/".endswith(f"/{wanted.strip('/')}/")
            within = wanted is not None and f"/{wanted.strip('/')}/" in f"/{name}/"
            if wanted is not None and not (inside or within):
                continue
            start = room / "__init__.py"
            yield _line(f"{name}/ ({len(files(room))})", purpose(start) if start.exists() else "")
            if inside:
                yield from (_line(f"  {path.name}", purpose(path)) for path in files(room))


def _line(name: str, meaning: str) -> str:
    head = name if len(name) < WIDTH else f"{name}\n"
    text = textwrap.fill(meaning, 96, subsequent_indent=" " * WIDTH)
    return f"{head:<{WIDTH}}{text}" if head == name else f"{head}{'':<{WIDTH}}{text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("room", nargs="?", help="e.g. storage/region or policy; all without it")
    wanted = parser.parse_args(arguments).room
    found = list(lines(wanted))
    if not found:
        print(f"there is no room {wanted}; without an argument all are listed", file=sys.stderr)
        return 2
    print("\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
