"""Every relative link of a document leads somewhere, its anchor too; what ``docs/architecture.md``
names exists; what scripts write into files is up to date."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

from kit.commands import ran
from kit.kept_files import ROOT, kept_files

MAX_FRONT_PAGE_BYTES = 8500


def test_the_front_page_stays_short() -> None:
    assert (ROOT / "README.md").stat().st_size < MAX_FRONT_PAGE_BYTES


@pytest.mark.parametrize("name", ["write_tables", "write_dashboard", "write_openapi"])
def test_files_say_what_the_code_says(name: str) -> None:
    """Run as a person does; without ``--check`` the script mends them."""
    ended = ran(sys.executable, ROOT / "scripts" / f"{name}.py", "--check")
    assert ended.returncode == 0, ended.stdout + ended.stderr


# ---- Links ----

PARSER = MarkdownIt("commonmark").enable("table")


def links(text: str) -> list[str]:
    """Targets of links and pictures, also of those inside a cell or of a reference."""
    inline = [child for token in PARSER.parse(text) for child in token.children or ()]
    targets = [token.attrGet("href") or token.attrGet("src") for token in inline]
    return [str(target) for target in targets if target]


def anchors(text: str) -> set[str]:
    """The headings of a document as GitHub makes anchors of them."""
    tokens = PARSER.parse(text)
    seen: Counter[str] = Counter()
    found = set()
    for opening, inline in zip(tokens, tokens[1:], strict=False):
        if opening.type == "heading_open":
            shown = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def dead_links(document: Path, text: str, kept: frozenset[Path]) -> list[str]:
    dead = []
    for link in links(text):
        target = urlsplit(link)
        if target.scheme or target.netloc:
            continue
        path = (document.parent / unquote(target.path)).resolve() if target.path else document
        if path not in kept and not any(path in one.parents for one in kept):
            dead.append(f"{link}: nothing is there")
        elif target.fragment:
            there = text if path == document else path.read_text(encoding="utf-8")
            if path.suffix != ".md" or unquote(target.fragment) not in anchors(there):
                dead.append(f"{link}: no such heading")
    return dead


def test_no_document_links_to_what_is_not_there() -> None:
    kept = kept_files()
    documents = sorted(path for path in kept if path.suffix == ".md")
    assert ROOT / "README.md" in documents
    found = [
        f"{document.relative_to(ROOT)}: {line}"
        for document in documents
        for line in dead_links(document, document.read_text(encoding="utf-8"), kept)
    ]
    assert not found, "\n".join(found)


def test_every_alert_leads_to_a_section() -> None:
    rules = yaml.safe_load((ROOT / "scripts/grafana/alerts.yaml").read_text(encoding="utf-8"))
    named = [rule["annotations"]["runbook"] for group in rules["groups"] for rule in group["rules"]]
    text = "\n".join(f"[a runbook]({one})" for one in named)
    assert named
    assert dead_links(ROOT / "README.md", text, kept_files()) == []


DEAD = [
    "[a file](docs/gone.md)",
    "[a heading](CONTRIBUTING.md#gone)",
    "[a heading of its own](#gone)",
    "[a reference][a]\n\n[a]: gone.json",
    "| a |\n|---|\n| [a cell](gone.md) |",
    "[outside the repository](../elsewhere.md)",
    "[ignored by git](.venv/bin/python)",
]
GOOD = [
    "[a folder](benchmark/results)",
    "# Twice\n\n# Twice\n\n[the second](#twice-1)",
    "`[no](gone.md)`",
]


@pytest.mark.parametrize("text", [*DEAD, *GOOD])
def test_only_a_dead_link_is_caught(text: str) -> None:
    assert len(dead_links(ROOT / "README.md", text, kept_files())) == (text in DEAD)


# ---- What the page of the architecture names ----

PRODUCT = ROOT / "python" / "sglang_tiered"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@cache
def members() -> dict[str, set[str]]:
    """Return what each class of the product defines, what its bases here define included."""
    found: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            names = found.setdefault(node.name, set())
            bases.setdefault(node.name, []).extend(ast.unparse(base) for base in node.bases)
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(part.name)
                elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    names.add(part.attr)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    names.add(part.target.id)
    for name, parents in bases.items():
        for parent in parents:
            found[name] |= found.get(parent.split("[")[0], set())
    return found


def quoted(pattern: str) -> list[str]:
    return sorted(
        {name for name in re.findall(r"`([^`\n]+)`", PAGE) if re.fullmatch(pattern, name)}
    )


def test_page_names_members_that_classes_have() -> None:
    named = [name for name in quoted(r"[A-Z]\w+\.\w+") if not name.endswith((".md", ".py"))]
    assert len(named) > 40
    lacking = [
        name for name in named if name.split(".")[1] not in members().get(name.split(".")[0], set())
    ]
    assert not lacking


def test_page_names_files_that_exist() -> None:
    named = quoted(r"[\w/]+\.py")
    files = {str(path.relative_to(PRODUCT)) for path in PRODUCT.rglob("*.py")}
    assert len(named) > 30
    assert not [
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
