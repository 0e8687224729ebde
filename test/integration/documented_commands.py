"""The command lines of a Markdown page.

A fence of language ``sh`` holds command lines that a reader runs as they stand, one a line (a
backslash or an open quote continues it). Where they cannot run in a test, the line right before
the fence says why: ``<!-- not run: REASON -->``. Other fences hold no command lines. Between
backquotes in a sentence a command line may be an example; what it names has to exist.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).resolve().parents[2]
FRONT_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""What they say to type is run."""

_ROOMS = ("python", "kernels", "benchmark", "scripts", "test", "requirements", "deploy")
OTHER_PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / ".github" / "pull_request_template.md",
    *sorted(path for room in _ROOMS for path in (ROOT / room).rglob("*.md")),
]

ISSUE_FORMS = [
    path
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if path.name != "config.yml"
]

SERVERS = (
    "scripts/serve",
    "scripts/serve-cluster",
    "scripts/serve-pd",
    "sglang serve",
    "python -m sglang.launch_server",
    "python -m sglang_tiered.launch_server",
    "sglang-tiered serve",
)
"""Command lines that run until they are stopped."""

RUN_ELSEWHERE = {
    "scripts/demo": "test/integration/test_demo.py",
    "scripts/lint": ".ci/run",
    "scripts/serve-cluster": "test/integration/test_route.py",
    "scripts/test": ".ci/run",
}
"""Command lines that something else runs, and what."""

_COMMAND = re.compile(
    r"(\$ |([A-Z_]+=\S+ )*(\.?/?scripts/\w|python3? |curl |pip |sglang(-tiered)? |git ))"
)
_MARK = re.compile(r"<!--\s*not run\b:?(?P<reason>.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command line, and where it stands."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def words(self) -> list[str]:
        """Without comments and without the variables that are set for it."""
        words = shlex.split(self.text, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        return words

    def begins_with(self, *beginnings: str) -> bool:
        return any(
            self.words[: len(words)] == words for words in map(str.split, beginnings) if words
        )

    @property
    def is_server(self) -> bool:
        return self.begins_with(*SERVERS) and "--help" not in self.words


@dataclass(frozen=True)
class Block:
    """One fence. ``not_run`` is the reason of its mark, which may be empty, or None without one."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def commands(self) -> list[Command]:
        """Its command lines; of a fence in another language those that obviously are some."""
        found = [Command(self.page, self.line + number, text) for number, text in _lines(self.text)]
        if self.language == "sh":
            return found
        return [command for command in found if looks_like_a_command(command.text)]

    @property
    def problem(self) -> str | None:
        """How it breaks the rules above, if it does."""
        where = f"{self.page}:{self.line}"
        if self.language != "sh":
            if self.not_run is not None:
                return f"{where}: a mark belongs before a fence of language sh"
            if self.commands:
                return f"{where}: command lines belong in a fence of language sh"
        elif not self.commands:
            return f"{where}: there is no command line in it"
        elif self.not_run == "":
            return f"{where}: the mark gives no reason"
        return None


def looks_like_a_command(text: str) -> bool:
    return _COMMAND.match(text.lstrip()) is not None


def page_blocks(path: Path) -> list[Block]:
    """The fences of a page, in order, those in lists and quotes too."""
    page, found, mark = str(path.relative_to(ROOT)), [], None
    for token in MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8")):
        if token.map is None:
            continue
        start, end = token.map
        if token.type == "fence":
            reason = None
            if mark is not None and mark[1] == start:
                reason, mark = mark[0], None
            found.append(Block(page, start + 2, token.info.strip(), token.content, reason))
        elif token.type == "html_block" and (match := _MARK.search(token.content)):
            _refuse_a_mark_of_nothing(mark, page)
            mark = match["reason"].strip(), end
    _refuse_a_mark_of_nothing(mark, page)
    return found


def inline_commands_of(markdown: str, page: str) -> list[Command]:
    """What stands between backquotes and looks like a command line."""
    return [
        Command(page, token.map[0] + 1, child.content)
        for token in MarkdownIt("commonmark").enable("table").parse(markdown)
        if token.type == "inline" and token.map is not None
        for child in token.children or ()
        if child.type == "code_inline" and looks_like_a_command(child.content)
    ]


def page_inline_commands(path: Path) -> list[Command]:
    return inline_commands_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))


def form_commands(path: Path) -> list[Command]:
    """What the texts of an issue form have between backquotes."""
    elements = yaml.safe_load(path.read_text(encoding="utf-8"))["body"]
    texts = [text for one in elements for text in one["attributes"].values()]
    page = str(path.relative_to(ROOT))
    return [c for text in texts if isinstance(text, str) for c in inline_commands_of(text, page)]


def _refuse_a_mark_of_nothing(mark: tuple[str, int] | None, page: str) -> None:
    if mark is not None:
        raise ValueError(f"{page}:{mark[1]}: the mark stands before no fence")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Whole command lines with the place of their first line; no comments of their own."""
    begun: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines()):
        if not begun:
            start = number
            if not line.strip() or line.lstrip().startswith("#"):
                continue
        begun.append(line)
        whole = "\n".join(begun)
        if not line.endswith("\\") and _quotes_are_closed(whole):
            yield start, whole
            begun = []
    if begun:
        yield start, "\n".join(begun)


def _quotes_are_closed(text: str) -> bool:
    with contextlib.suppress(ValueError):
        shlex.split(text, comments=True)
        return True
    return False
