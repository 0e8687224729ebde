"""Tables in documents say what the code says; the front page stays one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.commands import ran

ROOT = Path(__file__).parents[2]
MAX_FRONT_PAGE_BYTES = 8500


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


write_tables = _script("write_tables")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_front_page_stays_short() -> None:
    assert len(page("README.md").encode()) < MAX_FRONT_PAGE_BYTES


def test_tables_say_what_the_code_says() -> None:
    """Run as a person does; ``scripts/write_tables.py`` mends them."""
    script = ROOT / "scripts" / "write_tables.py"
    ended = ran(sys.executable, script, "--check")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_stale_table_is_found_and_mended() -> None:
    page = "# Page\n\n<!-- table: one -->\n| old |\n<!-- end of table -->\nText.\n"
    mended = write_tables.rewritten(page, {"one": "| new |\n"})
    assert mended == page.replace("old", "new")
    assert write_tables.rewritten(mended, {"one": "| new |\n"}) == mended
    with pytest.raises(KeyError):
        write_tables.rewritten(page, {"other": ""})


def test_every_table_stands_on_one_page() -> None:
    shown = "".join(page(name) for name in write_tables.PAGES)
    for name, table in write_tables.tables().items():
        assert shown.count(f"<!-- table: {name} -->\n{table}") == 1, name
