"""Figures in documents are those of the result files they name; pictures are drawn from them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from draw_results import DRAWN, RESULTS, NothingToDrawError, draw_all

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/measurements.md", "docs/routing.md")
# The columns of a table whose figures are compared.
MEASURED, SOURCE = "measured", "in its result file"
NUMBER = r"-?[\d,]+(?:\.\d+)?"
FIGURE = re.compile(rf"({NUMBER})(%?)(?: \(({NUMBER}) to ({NUMBER})\))?")


@cache
def ratios(path: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads(path.read_text(encoding="utf-8"))["ratios"])


def rows(text: str) -> list[dict[str, Token]]:
    """Every row of every table, its cells by the head of their column."""
    found: list[dict[str, Token]] = []
    heads: list[str] = []
    cells: list[Token] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for token, following in zip(tokens, tokens[1:], strict=False):
        if token.type in ("th_open", "td_open"):
            cells.append(following)
        elif token.type == "tr_open":
            cells = []
        elif token.type == "thead_close":
            heads = [cell.content for cell in cells]
        elif token.type == "tr_close" and following.type != "thead_close":
            found.append(dict(zip(heads, cells, strict=True)))
    return found


def wrong_figures(document: Path, text: str) -> tuple[int, list[str]]:
    """How many figures were compared, and which are not those of their file."""
    compared, wrong = 0, []
    for row in rows(text):
        if SOURCE not in row:
            continue
        figures = [FIGURE.fullmatch(part) for part in row[MEASURED].content.split("; ")]
        children = row[SOURCE].children or []
        names = [
            (document.parent / str(opening.attrGet("href")), inside.content)
            for opening, inside in zip(children, children[1:], strict=False)
            if opening.type == "link_open"
        ]
        if not names or len(names) != len(figures):
            wrong.append(f"{row[MEASURED].content!r}: as many names as figures are wanted")
            continue
        for figure, (path, name) in zip(figures, names, strict=True):
            compared += 1
            known = ratios(path.resolve()).get(name)
            if figure is None or known is None or not _agree(figure, known):
                wrong.append(f"{row[MEASURED].content!r}: {name} is {known}")
    return compared, wrong


def _agree(figure: re.Match[str], known: dict[str, float]) -> bool:
    middle, percent, low, high = figure.groups()
    pairs = [(middle, known["value"])]
    if low is not None:
        pairs += [(low, known["min"]), (high, known["max"])]
    factor = 100 if percent else 1
    return all(_is_rounded(text, value * factor) for text, value in pairs)


def _is_rounded(text: str, value: float) -> bool:
    digits = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_figure_equals_its_result_file(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    compared, wrong = wrong_figures(ROOT / name, text)
    assert not wrong, "\n".join(wrong)
    assert compared >= 3


TABLE = """\
| figure | measured | aim | in its result file |
|---|---|---|---|
| returns | {} | | {} |
"""
SOURCE_OF_IT = "[returning_ttft_over_stock](benchmark/results/rounds_2core_epyc_202611.json)"


@pytest.mark.parametrize(
    ("measured", "source"),
    [
        ("{1} ({1} to {2})", SOURCE_OF_IT),
        ("{0} ({0} to {2})", SOURCE_OF_IT),
        ("about {0}", SOURCE_OF_IT),
        ("{0}", ""),
        ("{0}", SOURCE_OF_IT.replace("stock]", "stuck]")),
    ],
)
def test_a_wrong_figure_is_caught(measured: str, source: str) -> None:
    result = json.loads((RESULTS / "rounds_2core_epyc_202611.json").read_text())
    true = result["ratios"]["returning_ttft_over_stock"]
    figures = [f"{true[each]:.2f}" for each in ("value", "min", "max")]
    text = TABLE.format(measured.format(*figures), source)
    assert len(wrong_figures(ROOT / "README.md", text)[1]) == 1
    right = TABLE.format("{} ({} to {})".format(*figures), SOURCE_OF_IT)
    assert wrong_figures(ROOT / "README.md", right) == (1, [])


def test_no_picture_is_older_than_its_results(tmp_path: Path) -> None:
    # By itself, as people call it: what other tests of a process set moves lines by a hair.
    program = [sys.executable, str(RESULTS.parent / "draw_results.py")]
    subprocess.run([*program, "--pictures", str(tmp_path)], check=True, timeout=120)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in DRAWN.glob("*.svg")}
    del committed["page.svg"]  # of a server: scripts/draw_page.py
    assert drawn.keys() == committed.keys()
    old = [name for name in drawn if drawn[name] != committed[name]]
    assert not old, f"run benchmark/draw_results.py: {old}"


def test_a_demo_whose_answers_differ_is_not_drawn(tmp_path: Path) -> None:
    demo = json.loads((RESULTS / "demo_2core_epyc_202611.json").read_text(encoding="utf-8"))
    path = tmp_path / "demo_x.json"
    path.write_text(json.dumps(demo | {"answers_equal": False}))
    with pytest.raises(NothingToDrawError, match="differ"):
        draw_all(tmp_path, tmp_path)
    path.write_text(json.dumps(demo))
    assert len(draw_all(tmp_path, tmp_path)) == 1
