"""``Classes``: the YAML file that says which requests there are, and who may claim which.

    default: batch
    classes:
      interactive:
        ttft: 2s            # refused beyond it, while every server has work
        priority: 10        # servers: --enable-priority-scheduling
        sha256: [HEX]       # of the API keys whose requests these are
      batch:
        priority: 0
        ttft: 30s
        shed: false         # never refused

Keys stand there as digests (``printf %s KEY | sha256sum``), so that the file is no secret.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import parse_duration
from sglang_tiered.policy.shedding import RequestClass

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LIMIT_HEADER", "Classes"]

LIMIT_HEADER = "x-llm-d-slo-ttft-ms"
"""With which a request asks for a shorter limit than its class has."""
MAX_PRIORITY = 1_000_000
_FIELDS = {"ttft", "priority", "shed", "sha256"}


class Classes:
    """Without a file there is one class, of which nothing is refused."""

    def __init__(self, path: str | None) -> None:
        self._by_digest: dict[str, RequestClass] = {}
        self.default = RequestClass("default")
        if path is not None:
            self._read(path)

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

    def _read(self, path: str) -> None:
        def refuse(what: str) -> ConfigError:
            return ConfigError(f"--classes {path}: {what}; docs/cluster.md has an example.")

        try:
            document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise refuse(" ".join(f"it cannot be read ({error})".split())) from error
        if not isinstance(document, dict) or not isinstance(document.get("classes"), dict):
            raise refuse("it has no mapping named classes")
        if unknown := sorted(map(str, document.keys() - {"classes", "default"})):
            raise refuse(f"{unknown[0]!r} is not known; what may stand there is classes, default")
        made = {}
        for name, given in document["classes"].items():
            made[str(name)] = one = _class_of(str(name), {} if given is None else given, refuse)
            for digest in (given or {}).get("sha256", []):
                if digest in self._by_digest:
                    raise refuse(f"{digest[:8]}... is the digest of two classes")
                self._by_digest[digest] = one
        if document.get("default") not in made:
            raise refuse(f"default is {document.get('default')!r}, which is none of its classes")
        self.default = made[document["default"]]


def _class_of(name: str, given: Any, refuse: Any) -> RequestClass:
    if not isinstance(given, dict):
        raise refuse(f"class {name} is {given!r}, and no mapping")
    if unknown := sorted(map(str, given.keys() - _FIELDS)):
        known = ", ".join(sorted(_FIELDS))
        raise refuse(
            f"{unknown[0]!r} of class {name} is not known; what may stand there is {known}"
        )
    priority, shed, digests = (
        given.get("priority"),
        given.get("shed", True),
        given.get("sha256", []),
    )
    is_number = type(priority) is int and abs(priority) <= MAX_PRIORITY
    if not (priority is None or is_number):
        raise refuse(f"priority {priority!r} of class {name} is no whole number up to a million")
    if not isinstance(shed, bool):
        raise refuse(f"shed {shed!r} of class {name} is neither true nor false")
    if not isinstance(digests, list):
        raise refuse(f"sha256 of class {name} is no list")
    for digest in digests:
        if not (isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest)):
            raise refuse(f"{digest!r} of class {name} is no SHA-256 in hex")
    limit_s = None
    if "ttft" in given:
        limit_s = parse_duration(f"ttft of class {name} in", str(given["ttft"]))
    return RequestClass(name, limit_s, priority, shed)


def _limit_s(text: str) -> float | None:
    """Of a header in milliseconds; None for what is none."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text):
        return None
    return float(text) / 1000 or None
