"""Forms of issues and the commit hook are what GitHub and pre-commit can read, and ask for what
exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_commands import ISSUE_FORMS, form_commands

ROOT = Path(__file__).resolve().parents[2]
# GitHub's syntax for issue forms: what an element of each kind may have, and must have.
ATTRIBUTES = {
    "markdown": ({"value"}, {"value"}),
    "textarea": ({"label"}, {"label", "description", "placeholder", "value", "render"}),
    "input": ({"label"}, {"label", "description", "placeholder", "value"}),
    "dropdown": ({"label", "options"}, {"label", "description", "multiple", "options", "default"}),
    "checkboxes": ({"label", "options"}, {"label", "description", "options"}),
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def problems(form: dict[str, Any]) -> list[str]:
    """Why GitHub would show its empty form in place of this one."""
    found = [key for key in ("name", "description", "body") if not form.get(key)]
    found += sorted(
        form.keys()
        - {"name", "description", "body", "assignees", "labels", "projects", "title", "type"}
    )
    ids = []
    for place, element in enumerate(form.get("body") or []):
        kind = element.get("type")
        if kind not in ATTRIBUTES:
            found.append(f"body[{place}]: type {kind}")
            continue
        must, may = ATTRIBUTES[kind]
        given = element.get("attributes", {}).keys()
        found += [f"body[{place}]: {name}" for name in sorted((must - given) | (given - may))]
        found += sorted(element.keys() - {"type", "id", "attributes", "validations"})
        if kind != "markdown":
            ids.append(element.get("id"))
        found += sorted(element.get("validations", {}).keys() - {"required"})
    if not ids:
        found.append("nothing to fill in")
    if len({*ids}) != len(ids):
        found.append("an id twice")
    return found


def test_there_is_a_form_for_bugs() -> None:
    assert {path.name for path in ISSUE_FORMS} == {"bug.yml", "feature.yml"}


@pytest.mark.parametrize("path", ISSUE_FORMS, ids=lambda path: path.name)
def test_github_can_show_every_form(path: Path) -> None:
    assert problems(read(path)) == []


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"name": "n", "description": "d", "body": []}, "body"),
        ({"name": "n", "description": "d", "body": [{"type": "text"}]}, "body[0]: type text"),
        (
            {"name": "n", "description": "d", "body": [{"type": "input", "attributes": {}}]},
            "body[0]: label",
        ),
    ],
)
def test_a_broken_form_is_noticed(form: dict[str, Any], problem: str) -> None:
    assert problem in problems(form)


def test_the_bug_form_asks_what_answers_need() -> None:
    (path,) = [path for path in ISSUE_FORMS if path.name == "bug.yml"]
    required = {
        element["id"]
        for element in read(path)["body"]
        if element.get("validations", {}).get("required")
    }
    assert required == {"what", "version", "flags", "log"}
    asked = {command.text for command in form_commands(path)}
    assert {"sglang-tiered --version", "curl -s localhost:30000/server_info"} <= asked


def test_the_form_chooser_has_known_settings() -> None:
    settings = read(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")
    assert settings.keys() <= {"blank_issues_enabled", "contact_links"}
    assert settings["blank_issues_enabled"] is False


def test_the_commit_hook_is_the_lint_gate() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    (hook,) = repository["hooks"]
    assert hook["language"] == "system"
    assert {"id", "name", "entry"} <= hook.keys()
    assert hook["entry"] == "scripts/lint"
    assert os.access(ROOT / hook["entry"], os.X_OK)
