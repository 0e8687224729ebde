"""Tables in documents say what the code says; the front page stays one."""

from __future__ import annotations

import sys
from pathlib import Path

from kit.commands import ran

ROOT = Path(__file__).parents[2]
MAX_FRONT_PAGE_BYTES = 8500


def test_the_front_page_stays_short() -> None:
    assert (ROOT / "README.md").stat().st_size < MAX_FRONT_PAGE_BYTES


def test_tables_say_what_the_code_says() -> None:
    """Run as a person does; ``scripts/write_tables.py`` mends them."""
    ended = ran(sys.executable, ROOT / "scripts" / "write_tables.py", "--check")
    assert ended.returncode == 0, ended.stdout + ended.stderr
