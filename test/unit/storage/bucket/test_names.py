"""Names are those of the format, and what is foreign is nothing."""

from __future__ import annotations

import pytest

from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.bucket.erased import record_path
from sglang_tiered.storage.bucket.names import Layout, PageName, parse_page

LAYOUT = Layout(b"\x11" * 32)
PAGE = PageName(b"\xa1" * 32, b"\x22" * 16, 8 << 20, 7, 1_700_000_000, 0xDEADBEEF)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-", "_"),
        ("a1a1", "A1a1"),
        ("2023111422", "2023131422"),
        ("2023111422", "9999111422"),
        ("2023111422", "1969111422"),
        ("/1320", "/6020"),
        ("deadbeef", ""),
    ],
)
def test_a_name_that_is_not_ours_is_nothing(old: str, new: str) -> None:
    path = PAGE.path(LAYOUT)
    assert old in path
    assert parse_page(path.replace(old, new)) is None
    assert parse_page(path + "#1") is None


def test_names_are_those_of_version_2() -> None:
    what = Erasure(tenant=b"\x22" * 16, id=b"\xab" * 16)
    folder = f"v2/{'11' * 32}"
    page = f"{folder}/pages/2023111422/1320-7-{'22' * 16}-{'a1' * 32}-800000-00000000deadbeef"
    assert PAGE.path(LAYOUT) == page
    assert record_path(7, what, b"") == f"v2/erased/000000000007-{'ab' * 16}-t{'22' * 16}"
    assert LAYOUT.pin("a") == f"{folder}/pins/27c35e6e9373877f29e562464e46497e"
