"""Keys on disk, authenticators, and one sentence for what is wrong with a key directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.wire.keys import PEER, TAG_BYTES, Tagger, load_keys, make_keys, new_session_key


def test_each_role_loads_pair_and_peer_key(tmp_path: Path) -> None:
    made = make_keys(tmp_path)
    assert len(made) == 4
    prefill, decode = load_keys(tmp_path, "prefill"), load_keys(tmp_path, "decode")
    assert prefill.peer_public == decode.public
    assert decode.peer_public == prefill.public
    assert len({prefill.public, prefill.secret, decode.public, decode.secret}) == 4


UNUSABLE = ["", "no key at all", 'curve\n  public-key = "short"\n', "\xff"]
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no secret": (lambda folder: (folder / "prefill.key_secret").unlink(), "prefill.key_secret"),
    "no key of the other": (lambda folder: (folder / "decode.key").unlink(), "decode.key"),
    "others read": (lambda folder: (folder / "prefill.key_secret").chmod(0o640), "chmod 600"),
    "public for secret": (
        lambda folder: shutil.copyfile(folder / "prefill.key", folder / "prefill.key_secret"),
        "no secret key",
    ),
    "others write the key": (lambda folder: (folder / "decode.key").chmod(0o666), "go-w"),
    "all write the folder": (lambda folder: folder.chmod(0o1777), "--transfer-keys .*go-w"),
    "a group writes the folder": (lambda folder: folder.chmod(0o770), "--transfer-keys .*go-w"),
}


@pytest.mark.parametrize(("harm", "says"), HARMS.values(), ids=HARMS)
def test_keys_that_cannot_be_trusted_are_refused(
    harm: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    make_keys(tmp_path)
    harm(tmp_path)
    with pytest.raises(ConfigError, match=says):
        load_keys(tmp_path, "prefill")


@pytest.mark.parametrize("name", ["prefill.key_secret", "decode.key", "third.key"])
@pytest.mark.parametrize("content", UNUSABLE)
def test_a_file_that_is_no_key_is_refused(content: str, name: str, tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / name).write_text(content, encoding="latin-1")
    says = r"third\.key is not a usable key; copy it again" if name == "third.key" else None
    with pytest.raises(ConfigError, match=says):
        load_keys(tmp_path, "prefill")
    if says:
        (tmp_path / name).rename(tmp_path / ".third.key")  # which is not read
        load_keys(tmp_path, "prefill")


@pytest.mark.parametrize("role", ["prefill", PEER])
def test_keys_that_cannot_be_looked_for_are_told(role: str) -> None:
    with pytest.raises(ConfigError, match=r"-keys x+ cannot be read \(File name too long\)"):
        load_keys(Path("x" * 300), role)


def test_authenticator_binds_key_and_part_boundaries() -> None:
    tagger = Tagger(b"k" * 32)
    tag = tagger.tag(b"ab", b"c")
    assert len(tag) == TAG_BYTES
    assert tagger.is_right(tag, b"ab", b"c")
    for parts in ([b"a", b"bc"], [b"abc"], [b"ab", b"c", b""], [b"ab", b"d"], []):
        assert not tagger.is_right(tag, *parts)
    assert not Tagger(b"j" * 32).is_right(tag, b"ab", b"c")
    assert not tagger.is_right(b"", b"ab", b"c")
    assert not tagger.is_right(tag[:-1], b"ab", b"c")
    assert not Tagger(b"").is_right(tag, b"ab", b"c"), "nor is any right without a key"


def test_each_session_has_a_fresh_key(tmp_path: Path) -> None:
    make_keys(tmp_path)
    keys = load_keys(tmp_path, "prefill")
    assert new_session_key(None) == b""
    assert new_session_key(keys) != new_session_key(keys)
    assert len(new_session_key(keys)) == 32


def test_read_only_mount_allows_any_key_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path)
    tmp_path.chmod(0o1777)  # as Kubernetes mounts secrets
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    load_keys(tmp_path, "prefill")
