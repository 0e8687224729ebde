"""What the README says of the messages is what they are; each field is bounded, and each reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import inspect

import sglang_tiered.transfer
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.wire import sockets

README = (Path(sglang_tiered.transfer.__path__[0]) / "README.md").read_text(encoding="utf-8")
ALL = {
    *get_args(messages.AnyFromDecode),
    *get_args(messages.AnyFromPrefill),
    *get_args(messages.AnyDataFromDecode),
    *get_args(messages.AnyDataFromPrefill),
}


def rows() -> dict[str, list[str]]:
    """Of the table of messages: the fields in its third column, by message."""
    found = {}
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = cells[2].split(", ")
    return found


def test_readme_table_lists_every_message_and_field() -> None:
    expected = {kind.__name__: list(kind.__struct_fields__) for kind in ALL}
    assert rows() == expected


def sizes(kind: Any, name: str) -> Iterator[tuple[str, int | None]]:
    """How long each text, byte string and list may be, all the way down."""
    match kind:
        case inspect.StructType():
            for item in kind.fields:
                yield from sizes(item.type, f"{name}.{item.name}")
        case inspect.UnionType():
            for choice in kind.types:
                yield from sizes(choice, name)
        case inspect.ListType():
            yield name, kind.max_length
            yield from sizes(kind.item_type, f"{name}[]")
        case inspect.StrType() | inspect.BytesType():
            yield name, kind.max_length


def test_every_field_of_a_message_is_bounded() -> None:
    """A layout of two million layers took the only thread of an endpoint for seconds."""
    found = {}
    for message in (*ALL, messages.Offer):
        found |= sizes(inspect.type_info(message), message.__name__)
    assert len(found) > 15
    endless = {name for name, most in found.items() if most is None or most > 4096}
    cut = {name for name in found if name.endswith(".reason")}  # when they are used
    assert endless == cut | {"Last.aux[]"}, "whose length is compared with the pool's"
    layout = messages.KVLayout(1, "", [1] * 4096, [0] * 4096, 0, 1, 0, [], [])
    hello = messages.Hello(b"", "", layout, 1)
    assert sockets.decode(sockets.encode(hello), messages.control_from_decode) == hello
    layout.page_bytes.append(1)
    with pytest.raises(TransferError, match="length <= 4096"):
        sockets.decode(sockets.encode(hello), messages.control_from_decode)


def test_reasons_of_a_peer_fit_a_line() -> None:
    assert sockets.printable("a\nb\x00c\u202e") == "a b c "
    assert len(sockets.printable("x" * 9999)) == sockets.MAX_REASON
    with pytest.raises(TransferError, match=f"version 12 .* version {messages.VERSION};"):
        messages.check_version(b"sgt-kv/12", "a peer")
    with pytest.raises(TransferError) as refusal:
        messages.check_version(b"sgt-kv/\x1b[31m\n", "a peer")
    assert str(refusal.value).isprintable()
