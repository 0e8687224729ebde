"""What kinds of files there are, and how one is told from its first bytes.

Two questions, each answered here alone: how the rows lie in the file (``Layout``), and what a row
is (``Format``). Readers of rows know neither the file nor each other.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sglang_tiered.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


KNOWN = (
    "conversations (ShareGPT, OpenAI messages) as JSON, JSON lines or Parquet, Mooncake or "
    "Qwen-Bailian JSON lines, or an Azure LLM trace (CSV)"
)

LIST_KEYS = ("conversations", "conversation", "messages", "items")
"""Where a row has its messages."""


class Format(enum.Enum):
    SHAREGPT = "sharegpt"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    AZURE = "azure"

    @property
    def title(self) -> str:
        return _TITLES[self]


_TITLES = {
    Format.SHAREGPT: "ShareGPT",
    Format.MOONCAKE: "Mooncake",
    Format.BAILIAN: "Qwen-Bailian",
    Format.AZURE: "Azure",
}


class Layout(enum.Enum):
    """How rows lie in a file."""

    LINES = enum.auto()  # one a line
    ARRAY = enum.auto()  # a JSON array, also as the first value of an object
    OBJECT = enum.auto()  # a JSON object whose values are the rows, by name
    VALUES = enum.auto()  # JSON values of several lines, one after the other
    PARQUET = enum.auto()


class Form(NamedTuple):
    format: Format
    layout: Layout
    has_times: bool  # whether rows say when they came


# What a row of each format has, in lower case; the first that is all there decides.
_NAMES: tuple[tuple[Format, frozenset[str]], ...] = (
    (Format.BAILIAN, frozenset({"chat_id", "hash_ids"})),
    (Format.MOONCAKE, frozenset({"hash_ids"})),
    (Format.AZURE, frozenset({"timestamp", "contexttokens", "generatedtokens"})),
    *((Format.SHAREGPT, frozenset({key})) for key in (*LIST_KEYS, "payloads")),
    (Format.SHAREGPT, frozenset({"from", "value"})),
    (Format.SHAREGPT, frozenset({"role", "content"})),
)
_ROW_KEYS = {*LIST_KEYS, "id", "hash_ids", "timestamp", "session_id", "chat_id", "payloads"}
_WRAPPERS = {"data", "rows"}

_KEY = re.compile(rb'"(\w{1,64})"\s*:')
_FIRST_KEY = re.compile(rb'\{\s*"((?:[^"\\]|\\.)*+)"\s*:\s*(.)', re.DOTALL)


def form_of(head: bytes, path: Path, format: Format | None = None) -> Form:
    """The form of a file of text, from its first bytes. ``format`` is what the user says it is.
    Raises ``TraceError`` where none is known."""
    text = head.lstrip()
    if text.startswith((b"{", b"[")):
        names = [key.decode() for key in _KEY.findall(head)]
    else:
        names = _first_line(text).decode("utf-8", "replace").split(",")
    names = [name.strip(' "').lower() for name in names]
    known = Format.SHAREGPT if head.split() == [b"[]"] else detect(names)
    known = known if format is None else format
    if known is None:
        beginning = ascii(_first_line(text)[:40].decode("utf-8", "replace"))
        raise TraceError(
            f"{path} is in no known format (line 1 begins with {beginning}); expected {KNOWN}, or "
            "say which with --format."
        )
    return Form(known, _layout(text), "timestamp" in names)


def detect(names: Iterable[str]) -> Format | None:
    """The format of rows with these names (of keys or columns), in lower case."""
    found = set(names)
    return next((known for known, needed in _NAMES if needed <= found), None)


def _first_line(text: bytes) -> bytes:
    return text.split(b"\n", 1)[0].rstrip()


def _layout(text: bytes) -> Layout:
    if text.startswith(b"["):
        return Layout.ARRAY
    found = _FIRST_KEY.match(text)
    if found is None:
        return Layout.LINES
    key, begins = found[1].decode("utf-8", "replace"), found[2]
    line, ended, rest = text.partition(b"\n")
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        row = None
    is_row = key in _ROW_KEYS or (row is not None and not _ROW_KEYS.isdisjoint(row))
    if is_row or begins not in (b"{", b"["):
        # A row over several lines leaves something open at the end of its first.
        is_open = row is None and bool(ended) and line.rstrip()[-1:] in (b"{", b"[", b",", b":")
        return Layout.VALUES if is_open else Layout.LINES
    if row is not None and rest.strip():
        return Layout.LINES
    return Layout.ARRAY if key in _WRAPPERS and begins == b"[" else Layout.OBJECT
