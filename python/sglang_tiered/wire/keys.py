"""Keys of the roles, CURVE on sockets, and authenticators of data headers.

With a key directory the control channel is encrypted and both ends authenticate each other: an
instance has its role's secret key, and the peers' public keys. Data then carries a keyed BLAKE2b of
each header (which holds the slab's checksum), unless all of it is encrypted too. Based on CurveZMQ
(https://rfc.zeromq.org/spec/26) through pyzmq's certificates."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


ROLES = ("prefill", "decode")
PEER = "peer"
"""The role of servers that share pages: all have the same key pair."""

KEY_BYTES = 32
TAG_BYTES = 16
SESSION_DOMAIN = "sglang-tiered-session"
"""The domain in which ZAP (https://rfc.zeromq.org/spec/27) asks for passwords of sessions."""

_DOMAIN = "sglang-tiered"
_KEY_CHARS = 40  # 32 bytes as Z85


@dataclass(frozen=True, slots=True)
class Keys:
    """One role's key pair, the other's public key, and the directory whose ``*.key`` files name
    who is admitted. ``other_peers``: more keys that the other may have, while they are replaced.
    Keys are Z85 text, as CURVE wants them."""

    public: bytes
    secret: bytes
    peer_public: bytes
    directory: Path
    other_peers: tuple[bytes, ...] = ()

    def for_each_peer(self) -> list[Keys]:
        """Return keys for each key that the other may have, the first one first."""
        peers = (self.peer_public, *self.other_peers)
        return [replace(self, peer_public=each, other_peers=()) for each in peers]

    def guard_server(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Admit only peers whose public key is in ``directory``. Sockets that ask for passwords
        admit no peer until there are some. Returns the started thread; the caller stops it."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain=_DOMAIN, location=self.directory)
        return authenticator

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket encrypt as a server. Call before ``bind``."""
        socket.zap_domain = _DOMAIN.encode()
        socket.curve_server = True
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket encrypt as a client. Call before ``connect``."""
        socket.curve_serverkey = self.peer_public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


class Tagger:
    """Makes and checks authenticators; without a key they are empty and always right."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def tag(self, *parts: bytes) -> bytes:
        if not self._key:
            return b""
        digest = hashlib.blake2b(key=self._key, digest_size=TAG_BYTES)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def is_right(self, tag: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(tag, self.tag(*parts))


def new_session_key(keys: Keys | None) -> bytes:
    """A key for one session's data headers, sent over the encrypted control channel."""
    return b"" if keys is None else secrets.token_bytes(KEY_BYTES)


def password_of(key: bytes) -> str:
    """The password that admits data connections of the session with this key. It is sent in the
    clear and does not reveal the key."""
    return Tagger(key).tag(b"data connection").hex()


def admit_sessions(socket: zmq.Socket[bytes]) -> None:
    """Make a socket ask for the name and password of a session (PLAIN,
    https://rfc.zeromq.org/spec/24). Other peers cannot send a message, whose frames ZeroMQ would
    collect without a bound. Call before ``bind``."""
    socket.zap_domain = SESSION_DOMAIN.encode()
    socket.plain_server = True


def prove_session(socket: zmq.Socket[bytes], token: bytes, key: bytes) -> None:
    """Make a socket give the name and password of a session. Call before ``connect``."""
    socket.plain_username = token.hex().encode()
    socket.plain_password = password_of(key).encode()


def make_keys(directory: Path, roles: Sequence[str] = ROLES) -> list[Path]:
    """Write a key pair per role: ``ROLE.key`` (public) and ``ROLE.key_secret`` (mode 0600).

    Raises ``ConfigError`` rather than replace a key that servers may be using.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in roles:
        for name in (f"{role}.key", f"{role}.key_secret"):
            if (directory / name).exists():
                raise ConfigError(
                    f"{directory / name} exists; pass another directory, or move the old keys "
                    "away first."
                )
    made = []
    for role in roles:
        before = os.umask(0o077)
        try:
            made += [Path(path) for path in zmq.auth.create_certificates(directory, role)]
        finally:
            os.umask(before)
        (directory / f"{role}.key").chmod(0o644)
    return made


def load_keys(directory: Path, role: str) -> Keys:
    """Load this role's pair, and the other's public key with those beside it: of ``decode`` also
    each ``prefill-*.key``. Raises ``ConfigError``."""
    flag = "--tier-peer-keys" if role == PEER else "--transfer-keys"
    try:
        return _load(flag, directory, role)
    except OSError as error:
        raise ConfigError(
            f"{flag} {directory} cannot be read ({error.strerror}); let this user read it, and "
            "search the folders above it."
        ) from error


def _load(flag: str, directory: Path, role: str) -> Keys:
    other = PEER if role == PEER else ROLES[1 - ROLES.index(role)]
    own = directory / f"{role}.key_secret"
    _check_writers(flag, directory)
    for path in (own, directory / f"{other}.key"):
        if not path.is_file():
            raise ConfigError(
                f"{flag} {directory} has no {path.name}; make keys with sglang-tiered "
                f"keygen{' --role peer' if role == PEER else ''}, and copy it here."
            )
    if stat.S_IMODE(own.stat().st_mode) & 0o077:
        raise ConfigError(f"{own} can be read by others; chmod 600 it.")
    try:
        public, secret = zmq.auth.load_certificate(own)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {directory} holds no usable keys ({error}).") from error
    if secret is None:
        raise ConfigError(f"{own} holds no secret key; make new keys.")
    if not all(len(key) == _KEY_CHARS for key in (public, secret)):
        raise ConfigError(f"{flag} {directory} holds truncated keys; copy them again.")
    admitted = _admitted(flag, directory)
    others = [key for name, key in admitted.items() if name.startswith(f"{other}-")]
    return Keys(public, secret, admitted[f"{other}.key"], directory, tuple(others))


def _check_writers(flag: str, directory: Path) -> None:
    """Raises ``ConfigError`` if others can write ``*.key`` files, and so admit themselves."""
    if not directory.is_dir() or os.statvfs(directory).f_flag & os.ST_RDONLY:
        return
    for path in (directory, *sorted(directory.glob("[!.]*.key"))):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o022:
            raise ConfigError(
                f"{flag} {path} can be written by others, who could admit themselves; "
                "chmod go-w it."
            )


def _admitted(flag: str, directory: Path) -> dict[str, bytes]:
    """The keys in ``*.key`` files by their names, sorted. Raises ``ConfigError`` for a bad one: the
    authenticator would then read no file."""
    admitted = {}
    for path in sorted(directory.glob("[!.]*.key")):
        try:
            admitted[path.name], _ = zmq.auth.load_certificate(path)
        except (OSError, ValueError):
            admitted[path.name] = b""
        if len(admitted[path.name]) != _KEY_CHARS:
            raise ConfigError(
                f"{flag} {directory} admits every key in a *.key file, but {path.name} is not a "
                "usable key; copy it again, or move it away."
            )
    return admitted
