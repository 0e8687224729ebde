"""A flag is declared once: its text becomes a value or one sentence, and its help a row."""

from __future__ import annotations

import argparse
from typing import Annotated

import msgspec
import pytest

from sglang_tiered.config import GiB, MiB
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import (
    DIRECTORY,
    ON_OFF,
    Flag,
    add_arguments,
    choice,
    count,
    flags_of,
    parse_bytes,
    parse_duration,
    parse_share,
    refuse_given,
    refuse_gone,
    text,
    values_of,
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    url: Annotated[str, Flag("--url", text("URL"), "Where it is.", "none", is_secret=True)] = ""
    speed: Annotated[
        bool, Flag("--speed", choice({"slow": False, "fast": True}), "How `fast`.", "`slow`")
    ] = False
    share: Annotated[int, Flag("--max-share", count("N"), "At most 5% of it.", "1")] = 1
    hidden: Annotated[bool, Flag("hidden-one", ON_OFF, "For experts.", "`off`")] = False
    not_a_flag: int = 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 * GiB),
        ("64 gib", 64 * GiB),
        ("64GB", 64 * 10**9),
        ("1.5MiB", 3 * MiB // 2),
        ("4096", 4096),
        ("9007199254740993", 9007199254740993),  # beyond float: digits must not be lost
    ],
)
def test_size_with_unit_is_exact(text: str, expected: int) -> None:
    assert parse_bytes("--flag", text, otherwise="drop it") == expected


@pytest.mark.parametrize("text", ["", "64G", "GiB", "1e9", "64XiB", "0x10", "nan", "1 2GiB"])
def test_ambiguous_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--flag .*KiB"):
        parse_bytes("--flag", text, otherwise="drop it")


@pytest.mark.parametrize("text", ["0", "-1", "-4GiB", "0.0001"])
def test_zero_or_negative_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="greater than zero"):
        parse_bytes("--flag", text, otherwise="drop it")


@pytest.mark.parametrize(("text", "share"), [("25%", 0.25), ("1%", 0.01), ("100%", 1.0)])
def test_a_tenants_share_is_a_percentage(text: str, share: float) -> None:
    assert parse_share("--share", text) == share


@pytest.mark.parametrize("text", ["25", "0.25", "0%", "0.5%", "101%", "-5%", "", "1e1%", "inf%"])
def test_a_share_that_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--share .* percentage from 1% to 100%"):
        parse_share("--share", text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("1.5h", 5400), ("30m", 1800), ("7d", 604800), ("2w", 1209600)),
        *((" 12 H ", 43200), ("2.5", 2.5)),
    ],
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert parse_duration("--flag", text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "-1d", "1y", "d", "1h30m", "1e9", "nan", "inf", "1 day", "soon"]
)
def test_other_forms_of_a_time_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--flag .* is not a time; write for example 90s"):
        parse_duration("--flag", text)


def parsed(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("ours"), Settings)
    return values_of(Settings, vars(parser.parse_args(words)))


def test_only_what_was_given_becomes_a_value() -> None:
    assert parsed() == {}
    words = ("--speed", "fast", "--max-share", "-3", "--hidden-one", "on", "--url", "u")
    assert parsed(*words) == {"speed": True, "share": -3, "hidden": True, "url": "u"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--speed", "quick"), "--speed quick is unknown; choose one of slow, fast."),
        (("--max-share", "1.5"), "--max-share 1.5 is not a whole number."),
        (("--max-share", "9" * 5000), "is not a whole number."),
        (("--hidden-one", "yes"), "hidden-one yes is unknown; choose one of on, off."),
    ],
)
def test_an_unusable_value_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(*words)
    assert str(refused.value).endswith(sentence)


def test_help_shows_flags_and_hides_settings() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("ours"), Settings)
    shown = " ".join(parser.format_help().split())
    assert "--speed {slow,fast} How fast. Default: slow." in shown
    assert "At most 5% of it. Default: 1." in shown
    assert "hidden" not in shown


def test_a_refusal_does_not_show_a_secret() -> None:
    flags = flags_of(Settings)
    with pytest.raises(ConfigError, match=r"^--url URL is wrong here\.$"):
        refuse_given({"url": "redis://:hunter2@host"}, flags, "is wrong here")
    with pytest.raises(ConfigError, match=r"^--max-share 2 is wrong here\.$"):
        refuse_given({"max_share": "2"}, flags, "is wrong here")
    refuse_given({"max_share": None, "other": "2"}, flags, "is wrong here")


@pytest.mark.parametrize("words", [["--old", "x"], ["--old=x"]])
def test_a_flag_that_is_gone_names_its_successor(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--old is gone; use --new\.$"):
        refuse_gone(["--other", *words], {"--old": "use --new"})
    refuse_gone(["--older", "old"], {"--old": "use --new"})


def test_a_directory_is_absolute_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/house")
    assert DIRECTORY.parse("--dir", "~/kv") == "/house/kv"
    assert DIRECTORY.parse("--dir", "kv").startswith("/")
    with pytest.raises(ConfigError, match="--dir is empty"):
        DIRECTORY.parse("--dir", "")
