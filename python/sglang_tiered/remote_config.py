"""The flags of the tiers that servers share: the bucket, with what else it is opened with, and the
pages of other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import (
    DIRECTORY,
    TIME,
    Flag,
    Kind,
    MiB,
    TiB,
    count,
    size,
    text,
)

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file")


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where other servers are, and where this one gives them pages. ``url`` may carry a
    password."""

    servers: Annotated[
        str | None,
        Flag(
            "--tier-peers",
            text("HOST:PORT,..."),
            "Servers to share pages with: addresses or names, each with the port of its first "
            "rank, or `dns://NAME:PORT` for all addresses of a name. Names are resolved again "
            "every few seconds; this server may be among them.",
            default="none",
        ),
    ] = None
    url: Annotated[
        str | None,
        Flag(
            "--tier-index",
            text("URL"),
            "Redis in which servers that share pages name themselves, where they have no DNS name: "
            "`redis://host:6379`, `rediss://` (TLS) or `unix://`. With a password better in "
            "SGLANG_TIERED_INDEX_URL, as everybody can read command lines.",
            default="`SGLANG_TIERED_INDEX_URL`, or none",
            is_secret=True,
        ),
    ] = None
    host: Annotated[
        str,
        Flag(
            "--tier-peer-host",
            text("HOST"),
            "Where this server gives pages to others. `0.0.0.0` is told to them as the address "
            "from which it reaches the Redis.",
            default="`--host`",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int | None,
        Flag(
            "--tier-peer-port",
            count("PORT"),
            "Its port; each further rank takes the next one.",
            default="the port that all of `--tier-peers` have, with `--tier-index` any free one",
        ),
    ] = None
    keys_directory: Annotated[
        str | None,
        Flag(
            "--tier-peer-keys",
            DIRECTORY,
            "Directory, writable by its owner only, with `peer.key`, `peer.key_secret` and the "
            "`*.key` of those to serve (`sglang-tiered keygen`). With it pages travel "
            "encrypted.",
            default="none",
        ),
    ] = None

    @property
    def shown_url(self) -> str | None:
        """The URL without what may be secret, for messages."""
        if self.url is None:
            return None
        scheme, separator, rest = self.url.partition("://")
        return scheme + separator + rest.rpartition("@")[2].partition("?")[0] if separator else "it"

    @property
    def shown(self) -> str:
        """Where other servers are looked for, for messages."""
        index = None if self.url is None else f"those named in {self.shown_url}"
        return " and ".join(filter(None, (self.servers, index)))

    def __repr__(self) -> str:
        return f"PeerConfig({self.shown!r}, {self.host!r}, {self.port}, {self.keys_directory})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("shown", self.shown)]


def object_url(flag: str, text: str) -> str:
    """The URL of a place for objects; a path stands for the URL of that directory. Raises
    ``ConfigError``."""
    if "://" not in text and text.startswith(("/", "~")):
        text = Path(text).expanduser().absolute().as_uri()
    scheme = text.partition("://")[0]
    try:
        _, host, path, _, _ = urlsplit(text)
    except ValueError:
        host = path = ""
    is_place = bool(path.strip("/")) and host in ("", "localhost") if scheme == "file" else host
    if scheme not in OBJECT_SCHEMES or not is_place:
        raise ConfigError(
            f"{flag} {_shown(text)} is not a place for objects; write s3://bucket/prefix, "
            "gs://bucket/prefix, az://container/prefix or the absolute path of a shared directory."
        )
    _check_bare(flag, text)
    return text


def _check_bare(flag: str, url: str) -> None:
    """Refuse a URL that tells more than a place."""
    if _shown(url) != url:
        raise ConfigError(
            f"{flag} {_shown(url)} carries credentials or options; leave them out, they come from "
            "the environment (AWS_ACCESS_KEY_ID and the like)."
        )


def _shown(url: str) -> str:
    """A URL without what may be secret."""
    scheme, separator, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    bare = place.rpartition("@")[2] + slash + path
    return scheme + separator + bare.partition("?")[0].partition("#")[0]


class ObjectConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The object tier below NVMe, shared by all servers that name it. Daily limits are of this
    server, all ranks together. Credentials stay in the environment."""

    url: Annotated[
        str,
        Flag(
            "--tier-object-url",
            Kind("URL", object_url),
            "Object store below NVMe that servers share: `s3://bucket/prefix`, `gs://`, `az://`, "
            "or the path of a shared directory. Credentials come from the environment.",
            default="none",
            is_secret=True,
        ),
    ]
    capacity_bytes: Annotated[
        int,
        Flag(
            "--tier-object-bytes",
            size("drop it for 1TiB"),
            "Cap of what all servers with the same model and settings have there, kept by their "
            "collectors; the oldest goes first.",
            default="1TiB",
        ),
    ] = TiB
    ttl_s: Annotated[
        float | None,
        Flag(
            "--tier-object-ttl",
            TIME,
            "Age at which objects stop being found and are deleted, e.g. `7d`.",
            default="no limit",
        ),
    ] = None
    writes_per_day: Annotated[
        int | None,
        Flag(
            "--tier-object-writes-per-day",
            size("drop it for no limit"),
            "What this server may write there in any 24 hours, e.g. `200GiB`.",
            default="no limit",
        ),
    ] = None
    requests_per_day: Annotated[
        int | None,
        Flag(
            "--tier-object-requests-per-day",
            count("N"),
            "Pages it may put there in any 24 hours, a request each.",
            default="no limit",
        ),
    ] = None

    refresh_s: float = 5.0  # how often other servers' pages are looked for
    max_pages: int = 2_000_000  # of the index in memory; the oldest are forgotten first
    max_tenant_bytes: int | None = None  # of one tenant; its own oldest are forgotten for it
    num_connections: int = 8  # requests under way that load pages; half as many store them
    request_timeout_s: float = 10.0  # of one request, its body included, and of its retries
    staging_bytes: int = 256 * MiB  # pages that wait for their upload in their owner's memory

    def __post_init__(self) -> None:
        _check_bare("--tier-object-url", self.url)

    @property
    def max_page_bytes(self) -> int:
        """The longest page that can be kept."""
        return min(self.staging_bytes, self.capacity_bytes)
