"""Settings of peer sharing: what cannot work is refused, and no password is ever shown."""

from __future__ import annotations

import pytest
from rich.pretty import pretty_repr

from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing.settings import PeerSettings, parse_index_url

PASSWORD = "corrrect-horse"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://localhost", "redis://localhost:6379/0"),
        (f"redis://:{PASSWORD}@192.0.2.7:7000/3", "redis://192.0.2.7:7000/3"),
        (f"rediss://user:{PASSWORD}@[2001:db8::1]/", "rediss://[2001:db8::1]:6379/0"),
        (f"rediss://h/0?ssl_ca_certs=/{PASSWORD}", "rediss://h:6379/0"),
        (f"unix://:{PASSWORD}@/run/redis.sock?db=2", "unix:///run/redis.sock"),
    ],
)
def test_shown_url_has_no_password(text: str, shown: str) -> None:
    settings = PeerSettings(index=parse_index_url(text))
    assert settings.shown_peers == shown
    for said in (repr(settings), str(settings), pretty_repr(settings)):
        assert shown in said
        assert PASSWORD not in said


def test_a_url_says_user_password_and_database() -> None:
    url = parse_index_url("redis://me:p%40ss@h:1/5")
    assert url.options == {"host": "h", "port": 1, "username": "me", "password": "p@ss", "db": 5}
    url = parse_index_url("unix://:p%40ss@/run/a%20b.sock?db=2")
    assert url.options == {"path": "/run/a b.sock", "password": "p@ss", "db": 2}


BEHIND = "@ @h:port @h:70000 @h:0 @h/database @h/1/2 @h/-1 @?host=h @h/0?db=1 #x@h @[h"
INVALID = [
    *("", "localhost:6379", f"http://:{PASSWORD}@h", f"redis://:{PASSWORD}@h/0?{PASSWORD}"),
    *(f"redis://:{PASSWORD}{rest}" for rest in BEHIND.split()),
    f"rediss://:{PASSWORD}@h/0?ssl_cert_reqs=whatever",
    *(f"unix://:{PASSWORD}@{rest}" for rest in ("h/run/redis.sock", "", f"/run/s?db={PASSWORD}")),
]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_url_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_index_url(text)
    said = str(caught.value)
    assert "." in said and "\n" not in said and PASSWORD not in said
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
