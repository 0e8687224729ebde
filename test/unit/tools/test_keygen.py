"""``keygen``: what it writes, what it says, and one sentence for what cannot work."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from transfer_pair import decode, prefill

from kit.commands import cli_of
from sglang_tiered.tools.keygen import main
from sglang_tiered.wire.keys import load_keys

pytestmark = pytest.mark.timeout(60)

FILES = {"prefill.key", "prefill.key_secret", "decode.key", "decode.key_secret"}


def test_keys_of_one_directory_let_both_roles_talk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "keys")]) == 0
    out = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "keys").iterdir()} == FILES
    assert all(name in out for name in FILES)
    # Each role gets what the command says, and no more.
    hosts = {
        "prefill": {"prefill.key_secret", "decode.key"},
        "decode": {"decode.key_secret", "prefill.key"},
    }
    keys = {}
    for role, names in hosts.items():
        directory = tmp_path / role
        directory.mkdir()
        for name in names:
            copied = directory / name
            copied.write_bytes((tmp_path / "keys" / name).read_bytes())
            copied.chmod(stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode))
        keys[role] = load_keys(directory, role)
    with prefill(keys=keys["prefill"]) as sender, decode(keys=keys["decode"]) as receiver:
        sender.endpoint.expect_room(1)
        receiver.open(1, [sender], [1])
        sender.events.wait_for("ready", 1)


def test_secret_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert main(["--out", str(tmp_path / "keys")]) == 0
    finally:
        os.umask(before)
    for path in (tmp_path / "keys").iterdir():
        readable = stat.S_IMODE(path.stat().st_mode) & 0o077
        assert bool(readable) == (path.suffix == ".key")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_keys_in_use_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "prefill.key").unlink()
    assert "exists" in cli_of(main, capsys)("--out", tmp_path).refusal
    del before["prefill.key"]
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
