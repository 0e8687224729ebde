"""The URL of the Redis that holds the index. Its shown form never contains a password."""

from __future__ import annotations

import urllib.parse
from typing import NamedTuple

from sglang_tiered.errors import ConfigError

__all__ = ["IndexUrl", "parse_index_url"]

_SCHEMES = ("redis", "rediss", "unix")
_DEFAULT_PORT = 6379
_TLS_OPTIONS = {
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
_CERT_REQS = ("none", "optional", "required")
_BOOLEANS = {"true": True, "false": False}


class IndexUrl(NamedTuple):
    """Where the index is. ``host`` is empty for a Unix socket."""

    scheme: str
    host: str
    port: int
    path: str  # of the Unix socket
    database: int
    username: str | None
    password: str | None
    tls: dict[str, str | bool]

    @property
    def shown(self) -> str:
        """The URL as logs may show it: without user, password and options."""
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.database}"

    def __repr__(self) -> str:
        return f"IndexUrl({self.shown})"


def parse_index_url(text: str) -> IndexUrl:
    """``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` for TLS, or
    ``unix://[[user]:password@]/path[?db=0]``. Raises ``ConfigError``, one sentence that repeats
    nothing that might be a password."""
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
        host = parts.hostname or ""
        options = dict(urllib.parse.parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _refusal(
            "cannot be parsed; write redis://[[user]:password@]host[:port][/db], and %23 for a # "
            "of the password"
        ) from None
    if parts.scheme not in _SCHEMES:
        raise _refusal("does not begin with redis://, rediss:// or unix://")
    if parts.fragment:
        raise _refusal("has a #; write it as %23 if it belongs to a password")
    is_socket = parts.scheme == "unix"
    if is_socket and (host or not parts.path.startswith("/")):
        raise _refusal("must give the absolute path of a socket, as in unix:///run/redis.sock")
    if not is_socket and not host:
        raise _refusal("names no host")
    if port == 0:
        raise _refusal("has port 0")
    allowed = {"redis": set(), "rediss": _TLS_OPTIONS, "unix": {"db"}}[parts.scheme]
    if options.keys() - allowed:
        known = ", ".join(sorted(allowed)) or "none"
        raise _refusal(f"has an unknown option; {parts.scheme}:// takes {known}")
    database = options.pop("db", "0") if is_socket else parts.path.strip("/") or "0"
    if not (database.isascii() and database.isdigit() and len(database) < 6):
        raise _refusal("names a database that is not a number")
    return IndexUrl(
        scheme=parts.scheme,
        host=host,
        port=port or _DEFAULT_PORT,
        path=urllib.parse.unquote(parts.path) if is_socket else "",
        database=int(database),
        username=_plain(parts.username),
        password=_plain(parts.password),
        tls=_tls(options),
    )


def _tls(options: dict[str, str]) -> dict[str, str | bool]:
    if options.get("ssl_cert_reqs", "none") not in _CERT_REQS:
        raise _refusal("must have ssl_cert_reqs none, optional or required")
    checks = options.get("ssl_check_hostname", "true").lower()
    if checks not in _BOOLEANS:
        raise _refusal("must have ssl_check_hostname true or false")
    if "ssl_check_hostname" not in options:
        return dict(options)
    return {**options, "ssl_check_hostname": _BOOLEANS[checks]}


def _plain(quoted: str | None) -> str | None:
    return urllib.parse.unquote(quoted) if quoted else None


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"the URL of the locality index (--tier-index) {what}.")
