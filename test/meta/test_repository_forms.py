"""Forms of issues and the commit hook are what GitHub and pre-commit can read, and ask for what
exists."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_commands import ISSUE_FORMS, form_commands
from jsonschema.validators import validator_for

ROOT = Path(__file__).resolve().parents[2]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def problems(form: dict[str, Any]) -> list[str]:
    """Why GitHub would show its empty form in place of this one."""
    place = "builtin_schemas/vendor/github-issue-forms.json"
    schema = json.loads(files("check_jsonschema").joinpath(place).read_text(encoding="utf-8"))
    found = [error.message for error in validator_for(schema)(schema).iter_errors(form)]
    ids = [one.get("id") for one in form.get("body", []) if one.get("type") != "markdown"]
    return found + ["an id twice"] * (len({*ids}) != len(ids))


def test_there_is_a_form_for_bugs() -> None:
    assert {path.name for path in ISSUE_FORMS} == {"bug.yml", "feature.yml"}


@pytest.mark.parametrize("path", ISSUE_FORMS, ids=lambda path: path.name)
def test_github_can_show_every_form(path: Path) -> None:
    assert problems(read(path)) == []


@pytest.mark.parametrize(
    "body",
    [
        [],
        [{"type": "text"}],
        [{"type": "input", "attributes": {}}],
        [{"type": "input", "attributes": {"label": "l", "colour": "red"}}],
        [{"type": "input", "id": "a", "attributes": {"label": label}} for label in "lm"],
    ],
)
def test_a_broken_form_is_noticed(body: list[dict[str, Any]]) -> None:
    assert len(problems({"name": "name", "description": "of it", "body": body})) == 1


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
