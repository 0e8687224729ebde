"""Command line flags, each declared once: ``Annotated[type, Flag(...)]`` on the field that it sets.

The declarations of a configuration give argparse its arguments, the configuration its values, a
refusal its sentence and ``docs/flags.md`` its rows. A name without dashes is a setting: it is for
the YAML file that ``--config`` names, and ``--help`` does not list it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}
_YAML_WORDS = {"true": "on", "false": "off"}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

EXTRAS = {
    "aiohttp": "route",
    "envoy": "route",
    "grpc": "route",
    "jinja2": "route",
    "matplotlib": "plot",
    "obstore": "object",
    "pyarrow": "parquet",
    "redis": "peers",
    "shtab": "tools",
}
"""Names of extras in ``pyproject.toml``, by the package that only some features import."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a flag takes. ``parse`` gets the flag's name and its text, and raises
    ``ConfigError``."""

    metavar: str
    parse: Callable[[str, str], Any]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. ``help`` and ``default`` are Markdown; ``--help`` shows them without backticks. The
    value of a secret flag is in no message."""

    name: str
    kind: Kind
    help: str
    default: str
    is_secret: bool = False

    @property
    def is_setting(self) -> bool:
        """Whether it is for the file of ``--config``."""
        return not self.name.startswith("--")

    @property
    def option(self) -> str:
        """How argparse knows it. SGLang turns the file of ``--config`` into options."""
        return f"--{self.name}" if self.is_setting else self.name

    @property
    def dest(self) -> str:
        """The attribute in which argparse leaves its text."""
        return self.name.lstrip("-").replace("-", "_")


def text(metavar: str) -> Kind:
    """Any text, as it is."""
    return Kind(metavar, lambda _, given: given)


def count(metavar: str) -> Kind:
    """A whole number from 1 on. The most is for the configuration to judge."""

    def parse(flag: str, given: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", given) or int(given) == 0:
            raise ConfigError(f"{flag} {given} is not a whole number from 1 on.")
        return int(given)

    return Kind(metavar, parse)


def within(kind: Kind, least: float, most: float, unit: str = "") -> Kind:
    """What another takes, from the least to the most; ``unit`` is for the sentence."""

    def parse(flag: str, given: str) -> Any:
        value = kind.parse(flag, given)
        if not least <= value <= most:
            raise ConfigError(f"{flag} {given} must be from {least:g}{unit} to {most:g}{unit}.")
        return value

    return Kind(kind.metavar, parse)


def choice(values: Mapping[str, Any]) -> Kind:
    """One of these words, with the value that each stands for."""
    # In YAML on and off are true and false.
    known = {**values, **{yaml: values[w] for yaml, w in _YAML_WORDS.items() if w in values}}

    def parse(flag: str, given: str) -> Any:
        if given not in known:
            words = ", ".join(values)
            raise ConfigError(f"{flag} {given} is unknown; choose one of {words}.")
        return known[given]

    return Kind("{" + ",".join(values) + "}", parse)


def size(otherwise: str) -> Kind:
    """A number of bytes. ``otherwise`` tells those who want zero of them what to do instead."""
    return Kind("SIZE", partial(parse_bytes, otherwise=otherwise))


def parse_bytes(flag: str, text: str, *, otherwise: str) -> int:
    """``64GiB`` (1024-based), ``64GB`` (1000-based) or plain bytes, as a positive integer.

    ``otherwise`` tells those who want none what to do instead.
    """
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _BYTES:
        raise ConfigError(
            f"{flag} {text!r} is not a size; write a number with KiB, MiB, GiB, TiB (powers of "
            "1024), KB, MB, GB, TB (powers of 1000), or plain bytes."
        )
    value = int(Decimal(match[1]) * _BYTES[match[2].lower()])
    if value <= 0:
        raise ConfigError(f"{flag} {text} must be greater than zero; {otherwise}.")
    return value


def format_bytes(num_bytes: int) -> str:
    """The shortest exact-looking form: ``64GiB``, ``1.5GiB``, ``512B``."""
    for unit, unit_bytes in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.4g}{unit}"
    return f"{num_bytes}B"


def parse_duration(flag: str, text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``12h``, ``7d``, ``2w`` or a plain number of them; anything else
    is a ``ConfigError``."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([smhdw]?)\s*", text.lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"{flag} {text} is not a time; write for example 90s, 30m, 12h or 7d.")
    return float(match[1]) * _SECONDS[match[2]]


def parse_share(flag: str, text: str) -> float:
    """``25%`` as 0.25; anything but 1% to 100% is a ``ConfigError``."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", text.strip())
    if match is None or not 1 <= float(match[1]) <= 100:
        raise ConfigError(
            f"{flag} {text} is not a share; write a percentage from 1% to 100%, or drop it to go "
            "without a limit."
        )
    return float(match[1]) / 100


def _absolute(flag: str, given: str, *, what: str) -> str:
    if not given.strip():
        raise ConfigError(f"{flag} is empty; name a {what}, or drop it.")
    return str(Path(given).expanduser().absolute())


DIRECTORY = Kind("DIR", partial(_absolute, what="directory"))
"""An absolute path, as a string."""
FILE = Kind("FILE", partial(_absolute, what="file"))
"""The same of a file."""
ON_OFF = choice({"on": True, "off": False})
SHARE, TIME = Kind("PERCENT", parse_share), Kind("TIME", parse_duration)


@cache
def _flags_by_field(config: type) -> dict[str, Flag]:
    hints = get_type_hints(config, include_extras=True)
    return {
        field: part
        for field, hint in hints.items()
        for part in getattr(hint, "__metadata__", ())
        if isinstance(part, Flag)
    }


def flags_of(*configs: type) -> list[Flag]:
    """The flags and settings of configurations, in the order of their fields."""
    return [flag for config in configs for flag in _flags_by_field(config).values()]


def values_of(config: type, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that were given, parsed. ``explicit`` is what argparse found,
    without defaults. Raises ``ConfigError``."""
    values = {}
    for field, flag in _flags_by_field(config).items():
        given = explicit.get(flag.dest)
        if given is not None:
            values[field] = flag.kind.parse(flag.name, given)
    return values


def add_arguments(group: argparse._ArgumentGroup, *configs: type) -> None:
    """Add the flags of configurations to a group of a parser. The parser keeps text; it lists no
    settings."""
    for flag in flags_of(*configs):
        shown = f"{flag.help} Default: {flag.default}.".replace("`", "").replace("%", "%%")
        group.add_argument(
            flag.option,
            metavar=flag.kind.metavar,
            help=argparse.SUPPRESS if flag.is_setting else shown,
            default=None,
        )


def refuse_given(explicit: Mapping[str, Any], flags: Iterable[Flag], why: str) -> None:
    """Raise ``ConfigError`` for the first of these flags that was given: name, value and why."""
    for flag in flags:
        given = explicit.get(flag.dest)
        if given is not None:
            shown = flag.kind.metavar if flag.is_secret else given
            raise ConfigError(f"{flag.name} {shown} {why}.")


def require(feature: str, package: str) -> None:
    """Raises ``ConfigError`` without the package. Imports nothing, so that it can be asked before
    anything else is done."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{feature} needs the package {package}; "
            f"pip install 'sglang-tiered[{EXTRAS[package]}]'."
        )
