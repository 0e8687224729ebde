"""What ``deploy/`` would run: the services of its compose file, and the images they are made of.

Compose and Docker are not needed: a service is what the file says, with variables filled in as
compose does it, and an image what the instructions of its stage in the Dockerfile say.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from dockerfile_parse import DockerfileParser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"

SECRETS = {
    "REDIS_PASSWORD": "redisword",
    "BUCKET_KEY_ID": "key-of-tests",
    "BUCKET_SECRET": "not-a-secret",
    "GRAFANA_PASSWORD": "not-a-secret",
}
"""Values for what the compose file asks for."""

_VARIABLE = re.compile(
    r"\$(?:\$|\{(?P<name>\w+)(?:(?P<how>:?[-?])(?P<rest>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*))"
)


class MissingVariable(ValueError):
    """What compose says and ends with."""


@dataclass(frozen=True)
class Mount:
    """A place of a container: of a named volume, or of a path of this repository."""

    source: str
    target: str

    @property
    def path(self) -> Path | None:
        """What is mounted, unless it is a volume."""
        return Path(os.path.normpath(DEPLOY / self.source)) if "/" in self.source else None


@dataclass(frozen=True)
class Service:
    """One service of the compose file."""

    name: str
    record: Mapping[str, Any]

    @property
    def command(self) -> list[str]:
        found = self.record.get("command", [])
        return shlex.split(found) if isinstance(found, str) else [str(word) for word in found]

    @property
    def health(self) -> list[str]:
        """The command of its health check, without compose's word for how to run it."""
        test = [str(word) for word in self.record.get("healthcheck", {}).get("test", [])]
        return test[1:]

    @property
    def environment(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.record.get("environment", {}).items()}

    @property
    def ports(self) -> list[int]:
        """What it listens on, and others may reach."""
        return [int(port) for port in self.record.get("expose", [])]

    @property
    def mounts(self) -> list[Mount]:
        return [Mount(*words.split(":")[:2]) for words in self.record.get("volumes", [])]


@dataclass
class Stage:
    """One stage of the Dockerfile: its name, what it is from, its instructions."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]

    @property
    def copied(self) -> dict[str, str]:
        """What it copies of the repository: path in the image by path there."""
        found = {}
        for value in self.values("COPY"):
            words = value.split()
            if words[0].startswith("--from="):
                continue
            *sources, target = [word for word in words if not word.startswith("--")]
            for source in sources:
                into = target.endswith("/")
                found[source] = target + Path(source).name if into else target
        return found


def read_services(variables: Mapping[str, str], path: Path = COMPOSE) -> dict[str, Service]:
    """Read a compose file as compose would. Raises ``MissingVariable``."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    filled = _map_strings(document, lambda text: interpolate(text, variables))
    return {name: Service(name, record) for name, record in filled["services"].items()}


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Fill in ``$NAME``, ``${NAME}``, ``${NAME-x}``, ``${NAME:-x}`` and ``${NAME:?x}``; ``$$`` is a
    dollar. Raises ``MissingVariable`` with the file's own sentence."""

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        if name is None:
            return "$"
        how, found = match["how"] or "", variables.get(name)
        if found is None or (found == "" and how.startswith(":")):
            if how.endswith("?"):
                raise MissingVariable(f"{name}: {match['rest']}")
            return match["rest"] or "" if how.endswith("-") else ""
        return found

    return _VARIABLE.sub(value, text)


def names_of_variables(path: Path) -> dict[str, str]:
    """The variables of a compose file, each with how it is asked for: ``:?``, ``:-``, ``-``, or
    nothing."""
    found: dict[str, str] = {}

    def note(text: str) -> str:
        for match in _VARIABLE.finditer(text):
            if name := match["name"] or match["bare"]:
                found[name] = match["how"] or ""
        return text

    _map_strings(yaml.safe_load(path.read_text(encoding="utf-8")), note)
    return found


def is_shell(words: list[str]) -> bool:
    """Whether a command is a script for a shell, its last word."""
    return len(words) > 2 and words[0] in ("sh", "bash") and words[1].startswith("-c")


def read_dockerfile(path: Path = DEPLOY / "Dockerfile") -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first stage with their values, and the stages by name."""
    parser = DockerfileParser(fileobj=BytesIO(path.read_bytes()))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for entry in parser.structure:
        name, value = entry["instruction"], entry["value"]
        if name == "COMMENT":
            continue
        if name == "FROM":
            base, _, alias = value.split()
            stage = stages[alias] = Stage(alias, interpolate(base, arguments))
        elif stage is not None:
            stage.instructions.append((name, value))
        elif name == "ARG":
            key, _, default = value.partition("=")
            arguments[key] = default
    return arguments, stages


_READ_ELSEWHERE = {"SGLANG_TIERED_INDEX_URL", "HF_HOME", "REDISCLI_AUTH", "AWS_REGION"}
_READ_ELSEWHERE |= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}  # by libraries
_READERS = (
    "sglang.srt.environ",
    "sglang.srt.utils.network",
    "sglang_tiered.storage.bucket.requests",
)


def unread(variables: Iterable[str], script: str = "") -> list[str]:
    """Those that neither SGLang nor this package nor the script reads."""
    sources = [Path(str(find_spec(name).origin)) for name in _READERS]  # type: ignore[union-attr]
    text = script + "".join(path.read_text(encoding="utf-8") for path in sources)
    named = r'\b{0} = Env|"{0}"|\${0}\b|{{owner}}{1}"'
    return [
        name
        for name in set(variables) - _READ_ELSEWHERE
        if not re.search(named.format(name, name.removeprefix("AWS")), text)
    ]


def words_of(value: str) -> list[str]:
    """The words of an instruction in exec form. Raises ``ValueError`` for another form."""
    found = json.loads(value)
    if not isinstance(found, list):
        raise ValueError(f"{value} is no exec form")
    return [str(word) for word in found]


def _map_strings(document: Any, change: Callable[[str], str]) -> Any:
    if isinstance(document, dict):
        return {key: _map_strings(value, change) for key, value in document.items()}
    if isinstance(document, list):
        return [_map_strings(value, change) for value in document]
    return change(document) if isinstance(document, str) else document
