"""A flag is declared once: its text becomes a value or one sentence."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import (
    ON_OFF,
    Flag,
    GiB,
    MiB,
    add_arguments,
    choice,
    count,
    flags_of,
    parse_bytes,
    parse_duration,
    parse_share,
    refuse_given,
    text,
    values_of,
)

Parse = Callable[[str, str], Any]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    url: Annotated[str, Flag("--url", text("URL"), "Where it is.", "none", is_secret=True)] = ""
    speed: Annotated[
        bool, Flag("--speed", choice({"slow": False, "fast": True}), "How `fast`.", "`slow`")
    ] = False
    share: Annotated[int, Flag("--max-share", count("N"), "At most 5% of it.", "1")] = 1
    hidden: Annotated[bool, Flag("hidden-one", ON_OFF, "For experts.", "`off`")] = False
    not_a_flag: int = 0


SIZE: Parse = functools.partial(parse_bytes, otherwise="drop it")


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (SIZE, "64 gib", 64 * GiB),
        (SIZE, "64GB", 64 * 10**9),
        (SIZE, "1.5MiB", 3 * MiB // 2),
        (SIZE, "9007199254740993", 9007199254740993),  # beyond float: digits must not be lost
        (parse_share, "25%", 0.25),
        (parse_duration, "1.5h", 5400),
        (parse_duration, "7d", 604800),
    ],
)
def test_values_with_units_are_exact(parse: Parse, text: str, expected: float) -> None:
    assert parse("--flag", text) == expected


@pytest.mark.parametrize(
    ("parse", "texts", "sentence"),
    [
        (SIZE, ["", "64G", "1e9", "0x10", "nan", "1 2GiB"], r"--flag .*KiB"),
        (SIZE, ["0", "-4GiB", "0.0001"], "greater than zero"),
        (parse_share, ["25", "0%", "101%", "-5%", "inf%"], "--flag .* from 1% to 100%"),
        (parse_duration, ["", "0", "-1d", "1y", "1h30m", "nan", "inf"], "--flag .* is not a time"),
    ],
)
def test_other_forms_are_refused(parse: Parse, texts: list[str], sentence: str) -> None:
    for each in texts:
        with pytest.raises(ConfigError, match=sentence):
            parse("--flag", each)


def parsed(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("ours"), Settings)
    return values_of(Settings, vars(parser.parse_args(words)))


def test_only_what_was_given_becomes_a_value() -> None:
    assert parsed() == {}
    words = ("--speed", "fast", "--max-share", "3", "--hidden-one", "on", "--url", "u")
    assert parsed(*words) == {"speed": True, "share": 3, "hidden": True, "url": "u"}


@pytest.mark.parametrize("word", ["--speed=quick", "--max-share=0", "--max-share=" + "9" * 5000])
def test_an_unusable_value_is_one_sentence(word: str) -> None:
    with pytest.raises(ConfigError, match=r"choose one of slow, fast\.$|whole number from 1 on\.$"):
        parsed(word)


def test_a_refusal_does_not_show_a_secret() -> None:
    flags = flags_of(Settings)
    with pytest.raises(ConfigError, match=r"^--url URL is wrong here\.$"):
        refuse_given({"url": "redis://:hunter2@host"}, flags, "is wrong here")
    refuse_given({"max_share": None, "other": "2"}, flags, "is wrong here")
