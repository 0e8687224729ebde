"""The URL of the Redis that holds the index. Its shown form never contains a password."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from redis import RedisError
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url

from sglang_tiered.errors import ConfigError

__all__ = ["IndexUrl", "parse_index_url"]

_TLS = "(?:ssl_(?:ca_certs|certfile|keyfile|cert_reqs|check_hostname)=[^&#]*&?)*"
_HOST = r"(?:[^/?#]*@)?(?:\[[0-9A-Fa-f:.]+\]|[^:@/?#\[\]]+)(?::0*[1-9]\d{0,4})?(?:/\d*)?"
_URL = re.compile(
    rf"redis://{_HOST}|rediss://{_HOST}(?:\?{_TLS})?|unix://(?:[^/?#]*@)?/[^?#]+(?:\?db=\d+)?"
)
"""Nothing else: redis-py passes over what it does not understand."""


class IndexUrl(NamedTuple):
    """Where the index is. ``options`` are for the constructor of ``kind``, user and password among
    them; ``shown`` has neither."""

    shown: str
    kind: type[Connection | SSLConnection | UnixDomainSocketConnection]
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"IndexUrl({self.shown})"


def parse_index_url(text: str) -> IndexUrl:
    """``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` for TLS, or
    ``unix://[[user]:password@]/path[?db=0]``. Raises ``ConfigError``, one sentence that repeats
    nothing of the text, as any of it might be a password."""
    usable = _URL.fullmatch(text) is not None
    try:
        options = parse_url(text) if usable else {}  # type: ignore[no-untyped-call]
        kind = options.pop("connection_class", Connection)
        kind(**options)  # connects to nothing, and refuses values that it does not know
    except (ValueError, TypeError, RedisError):
        usable = False
    if not usable:  # raised here, where no error is at hand whose text would be shown with it
        raise ConfigError(
            "the URL of the Redis (--tier-index, --servers of a front) cannot be used; write redis://"
            "[[user]:password@]host[:port][/db], the same with rediss:// for TLS (it takes "
            "?ssl_ca_certs=, ssl_certfile=, ssl_keyfile=, ssl_cert_reqs=, ssl_check_hostname=), or "
            "unix://[[user]:password@]/path[?db=0], and %23 for a # of the password."
        )
    scheme = text.partition("://")[0]
    if scheme == "unix":
        return IndexUrl(f"unix://{options['path']}", kind, options)
    options = {"port": 6379, "db": 0, **options}
    host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
    return IndexUrl(f"{scheme}://{host}:{options['port']}/{options['db']}", kind, options)
