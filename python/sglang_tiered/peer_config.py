"""The flags of sharing pages with other servers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sglang_tiered.flags import DIRECTORY, Flag, count, text

__all__ = ["PeerConfig"]


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
