"""``Classes``: the YAML file that says which requests there are, and who may claim which.

    default: batch
    classes:
      interactive:
        ttft: 2s            # refused beyond it, while every server has work
        priority: 10        # servers: --enable-priority-scheduling
        sha256: [HEX]       # of the API keys whose requests these are
      batch:
        ttft: 30s
        shed: false         # never refused

Keys stand there as digests (``printf %s KEY | sha256sum``), so that the file is no secret.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import parse_duration
from sglang_tiered.policy.routing import RequestClass

if TYPE_CHECKING:
    from collections.abc import Mapping


LIMIT_HEADER = "x-llm-d-slo-ttft-ms"
"""With which a request asks for a shorter limit than its class has."""


class _Class(msgspec.Struct, forbid_unknown_fields=True):
    ttft: str | int | float | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None
    shed: bool = True
    sha256: list[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    default: str
    classes: dict[str, Any]


class Classes:
    """Without a file there is one class, of which nothing is refused. Raises ``ConfigError``."""

    def __init__(self, path: str | None) -> None:
        self._by_digest: dict[str, RequestClass] = {}
        self.default = RequestClass("default")
        if path is not None:
            try:
                self._read(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
            except (OSError, ValueError, yaml.YAMLError) as error:
                why = " ".join(str(error).split())
                raise ConfigError(
                    f"--classes {path} cannot be used: {why}; docs/cluster.md has an example."
                ) from error

    def of(self, headers: Mapping[str, str]) -> RequestClass:
        """Return the class of a request. A header may shorten its limit."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        found = self.default
        if key and scheme.lower() == "bearer":
            digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
            found = self._by_digest.get(digest, found)
        if (asked := _limit_s(headers.get(LIMIT_HEADER, ""))) is None:
            return found
        limit_s = min(asked, math.inf if found.limit_s is None else found.limit_s)
        return RequestClass(found.name, limit_s, found.priority, found.is_sheddable)

    def _read(self, document: Any) -> None:
        file = msgspec.convert(document, _File)
        given = {}
        for name, fields in file.classes.items():
            try:
                given[name] = msgspec.convert({} if fields is None else fields, _Class)
            except msgspec.ValidationError as error:
                raise ValueError(f"class {name}: {error}") from error
        # A client may write any into its body, where it counts for want of one from here.
        lowest = 0 if any(one.priority is not None for one in given.values()) else None
        made = {}
        for name, one in given.items():
            limit_s = None
            if one.ttft is not None:
                limit_s = parse_duration(f"ttft of class {name} in", str(one.ttft))
            priority = lowest if one.priority is None else one.priority
            made[name] = RequestClass(name, limit_s, priority, one.shed)
            for digest in one.sha256:
                if digest in self._by_digest:
                    raise ValueError(f"{digest[:8]}... is the digest of two classes")
                self._by_digest[digest] = made[name]
        if file.default not in made:
            raise ValueError(f"default is {file.default!r}, which is none of its classes")
        self.default = made[file.default]


def _limit_s(text: str) -> float | None:
    """Of a header in milliseconds; None for what is none."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text):
        return None
    return float(text) / 1000 or None
