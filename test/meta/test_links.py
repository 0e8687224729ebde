"""Every relative link of a document leads somewhere, its anchor too."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

from kit.kept_files import ROOT, kept_files

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
