"""Scripts of ``sglang-tiered completion`` complete, in the shells themselves, what can be typed."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.commands import ran
from sglang_tiered import completion
from sglang_tiered.__main__ import COMMANDS

pytestmark = pytest.mark.filterwarnings("ignore")  # of SGLang's import

SHELLS = ("bash", "zsh")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    paths = {}
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert completion.main([shell]) == 0
        paths[shell] = folder / shell
        paths[shell].write_text(printed.getvalue(), encoding="utf-8")
    return paths


def offered(script: Path, *words: str, folder: Path | None = None) -> list[str]:
    """What bash offers for the last of the words, typed so far."""
    line = shlex.join(["sglang-tiered", *words])
    program = (
        f"source {shlex.quote(str(script))}\n"
        f"COMP_WORDS=({line}) COMP_CWORD={len(words)}\n"
        'COMP_LINE="${COMP_WORDS[*]}" COMP_POINT=${#COMP_LINE}\n'
        "ask=($(complete -p sglang-tiered))\n"
        'while [[ ${ask[0]} != -F ]]; do ask=("${ask[@]:1}"); done\n'
        '"${ask[1]}" sglang-tiered "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    ended = ran("bash", "--norc", "-c", program, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("sto",), ["store"]),
        (("store", "ver"), ["verify"]),
        (("store", "gc", "--max"), ["--max-bytes"]),
        (("trace", "gen"), ["generate"]),
        (("keygen", "--role", ""), ["prefill", "decode", "peer"]),
        (("completion", ""), ["bash", "zsh"]),
        (("serve", "--tier-nvme-b"), ["--tier-nvme-bytes"]),
        (("serve", "--max-total-"), ["--max-total-tokens"]),
        (("serve", "--disaggregation-mode", "dec"), ["decode"]),
        (("serve", "--versio"), []),
    ],
)
def test_bash_offers_commands_flags_and_choices(
    scripts: dict[str, Path], words: tuple[str, ...], wanted: list[str]
) -> None:
    assert offered(scripts["bash"], *words) == wanted


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from flags(below)
        elif action.help != argparse.SUPPRESS:
            yield from action.option_strings


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_flag_of_any_command_is_missing(scripts: dict[str, Path], name: str, shell: str) -> None:
    parser = importlib.import_module(COMMANDS[name].module).make_parser()
    script = scripts[shell].read_text(encoding="utf-8")
    assert not [flag for flag in flags(parser) if flag not in script]
