"""Command lines in documents name what exists, and stand where a test finds and runs them."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import pytest
from documented_commands import (
    FRONT_PAGES,
    ISSUE_FORMS,
    OTHER_PAGES,
    ROOT,
    RUN_ELSEWHERE,
    Command,
    form_commands,
    page_blocks,
    page_inline_commands,
)

from kit.commands import ran, run_here
from sglang_tiered.__main__ import COMMANDS

LAUNCHER = "python -m sglang_tiered serve"
# They take its flags; loading SGLang to ask each of them takes seconds.
PASS_FLAGS_ON = {
    "scripts/serve": LAUNCHER,
    "scripts/serve-cluster": LAUNCHER,
    "scripts/serve-pd": LAUNCHER,
    "sglang serve": "python -m sglang.launch_server",
}
# What they take is not ours to check.
OTHERS = (
    *("curl", "pip", "git", "docker", "kubectl", "awk"),
    *("python -m pip", "python -m pytest", "scripts/test", "python -m dynamo.frontend"),
)


def test_every_block_is_run_or_says_why_not() -> None:
    found = [block.problem for path in FRONT_PAGES for block in page_blocks(path)]
    assert not [problem for problem in found if problem is not None]


def test_what_is_said_to_be_run_elsewhere_is() -> None:
    for command, where in RUN_ELSEWHERE.items():
        assert command.rsplit("/", maxsplit=1)[-1] in (ROOT / where).read_text(encoding="utf-8")


def test_every_documented_command_line_names_what_exists() -> None:
    commands = [command for path in ISSUE_FORMS for command in form_commands(path)]
    for path in [*FRONT_PAGES, *OTHER_PAGES]:
        commands += [command for block in page_blocks(path) for command in block.commands]
        commands += page_inline_commands(path)
    assert len(commands) > 30
    wrong = [f"{command}: {why}" for command in commands if (why := unknown_in(command))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("scripts/nothing", "no such script"),
        ("sglang-tiered nothing", "no such command"),
        ("sglang-tiered store nothing --json", "invalid choice"),
        ("sglang-tiered keygen --nothing x", "no flag --nothing"),
        ("sglang-tiered keygen --out x", ""),
    ],
)
def test_a_name_that_is_gone_is_noticed(text: str, why: str) -> None:
    found = unknown_in(Command("page", 1, text))
    assert why in found
    assert bool(why) == bool(found)


def unknown_in(command: Command) -> str:
    """What a command line names that does not exist; empty if all does."""
    words = command.words
    if command.begins_with(*OTHERS):
        return ""
    if words[0] == "sglang-tiered":
        if not words[1].startswith("-") and words[1] not in COMMANDS:
            return "no such command"
        words = ["python", "-m", "sglang_tiered", *words[1:]]
    if words[:2] == ["python", "-m"]:
        program, rest = words[:3], words[3:]
        if not _is_module(program[2]):
            return "no such module"
    elif words[0] in ("python", "sglang"):
        program, rest = words[:2], words[2:]
    else:
        program, rest = words[:1], words[1:]
    script = next((word for word in program if "/" in word), None)
    if script is not None and not (ROOT / script).is_file():
        return "no such script"
    flags = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    if not flags:
        return ""
    asked = PASS_FLAGS_ON.get(" ".join(program))
    if asked is None:
        first_flag = next(i for i, word in enumerate(rest) if word.startswith("-"))
        subcommands = [word for word in rest[:first_flag] if re.fullmatch(r"[a-z_-]+", word)]
        asked = " ".join([*program, *subcommands])
    try:
        known = _help(asked)
    except ValueError as error:
        return str(error)
    missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", known)]
    return f"no flag {', '.join(missing)}" if missing else ""


def _is_module(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        return False
    return found is not None


@functools.cache
def _help(command: str) -> str:
    """What the command answers to ``--help``. Its exit code must be 0."""
    words = [*command.split(), "--help"]
    if words[0] == "python":
        code, text = _interpreter().submit(run_here, words[1:], ROOT).result(120)
    else:
        done = ran(str(ROOT / words[0]), *words[1:], timeout_s=120)
        code, text = done.returncode, done.stdout + done.stderr
    if code != 0:
        raise ValueError(f"{command} --help ends with {code}: {text.strip()[-300:]}")
    return str(text)


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    """One process for all programs, as most of them load torch or SGLang first."""
    made = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    atexit.register(made.shutdown)
    return made
