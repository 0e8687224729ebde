"""Scripts of ``sglang-tiered completion`` complete, in the shells themselves, what can be typed."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

import pytest

from sglang_tiered import completion
from sglang_tiered.__main__ import COMMANDS

pytestmark = pytest.mark.filterwarnings("ignore")  # of SGLang's import


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from flags(below)
        elif action.help != argparse.SUPPRESS:
            yield from action.option_strings


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_no_flag_of_any_command_is_missing(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main([shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS.values():
        parser = importlib.import_module(command.module).make_parser()
        assert not [flag for flag in flags(parser) if flag not in script]
