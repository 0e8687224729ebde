"""Figures in documents are those of the result files they name; pictures are drawn from them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import draw_results
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
        ("{0} ({1} to {0})", SOURCE_OF_IT),
        ("about {0}", SOURCE_OF_IT),
        ("{0}; {1}", SOURCE_OF_IT),
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


MACHINE = {"cpu": "A CPU", "cores": 3, "memory_gib": 5, "date": "2000-01-02"}
"""No figure of it was measured, nor of the documents below."""


@pytest.fixture
def demo() -> dict[str, Any]:
    """In the form of ``scripts/demo --json``."""
    row = {"ttft_s": {"median": 0.123, "min": 0.045, "max": 1.678}, "num_prompts": 7}
    tokens = {"device": 1111, "host": 2222, "nvme": 3333, "computed": 4444}
    rows = [{"from": name, "tokens": tokens, **row} for name in draw_results.DEMO_COLOURS]
    return {"date": "2000-01-02", "machine": MACHINE, "rows": rows, "answers_equal": True}


def drawn(folder: Path, name: str, document: dict[str, Any]) -> str:
    (folder / f"{name}.json").write_text(json.dumps(document))
    (path,) = draw_all(folder, folder)
    return path.read_text(encoding="utf-8")


def test_every_demo_figure_is_in_its_picture(tmp_path: Path, demo: dict[str, Any]) -> None:
    text = drawn(tmp_path, "demo_x", demo)
    shown = ["123 ms (45 to 1,678)", "1,111", "2,222", "3,333", "4,444", *draw_results.DEMO_COLOURS]
    assert not [part for part in shown if f">{part}<" not in text]
    assert "3 cores, A CPU, 5 GiB; 2000-01-02" in text


def test_a_demo_whose_answers_differ_is_not_drawn(tmp_path: Path, demo: dict[str, Any]) -> None:
    (tmp_path / "demo_x.json").write_text(json.dumps(demo | {"answers_equal": False}))
    with pytest.raises(NothingToDrawError):
        draw_all(tmp_path, tmp_path)
    assert not list(tmp_path.glob("*.svg"))


def test_every_place_of_same_turn_is_drawn(tmp_path: Path) -> None:
    """In the form of ``bench_serving``."""
    rounds = [
        {place: [{"ttft_s": seconds}] for place in draw_results.PLACES}
        for seconds in (0.1, 0.3, 1.7)
    ]
    raw = {"samples": rounds, "unequal": {}, "conditions": "3 turns of 5 tokens, each out of all"}
    document = {"machine": MACHINE, "raw": {"same_turn": raw}}
    text = drawn(tmp_path, "serving_same_turn_x", document)
    labels = [label for label, _ in draw_results.PLACES.values()]
    for part in ("300 ms (100 to 1,700)", "1,700", *labels):
        assert f">{part}<" in text, part
    raw["unequal"] = {"same_turn/0": {}}
    with pytest.raises(NothingToDrawError):
        drawn(tmp_path, "serving_same_turn_x", document)


def test_a_recorded_dashboard_shows_what_was_not_zero(tmp_path: Path) -> None:
    """In the form of ``record_dashboard``."""

    def panel(row: str, title: str, *lines: tuple[str, list[float | None]]) -> dict[str, Any]:
        drawn = [{"legend": legend, "values": values} for legend, values in lines]
        drawn += [{**line, "legend": f"{line['legend']} right", "unit": "s"} for line in drawn]
        return {"row": row, "title": title, "unit": "Bps", "is_stacked": False, "lines": drawn}

    shown, zero, empty = [None, 1.5, 0.0], [None, 0.0, 0.0], [None, None, None]
    panels = [
        panel("Row one", "Drawn", ("alpha", shown), ("beta", zero), ("gamma", empty)),
        panel("Row one", "Not drawn", ("delta", zero)),
        panel("Row two", "Not drawn either", ("epsilon", empty)),
        {**panel("Row three", "Stacked", ("zeta", shown)), "is_stacked": True},
    ]
    document = {
        "machine": MACHINE,
        "versions": {"prometheus": "9.9"},
        "settings": {"step_s": 5, "slow_disk": {"bytes_per_s": 2e6, "from_s": 4, "to_s": 6}},
        "raw": {"panels": panels},
    }
    text = drawn(tmp_path, "dashboard_x", document)
    for part in ("Row one", "Drawn", "alpha", "alpha right", "Row three", "Stacked", "zeta"):
        assert f">{part}<" in text, part
    for part in ("Row two", "Not drawn", "beta", "gamma", "delta", "epsilon"):
        assert f">{part}" not in text, part
    assert "2 MB/s. Prometheus 9.9. 3 cores, A CPU, 5 GiB; 2000-01-02" in text
