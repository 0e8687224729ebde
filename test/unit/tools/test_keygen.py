"""``keygen``: keys that let both roles talk, are their owner's alone, and replace no others."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from transfer_pair import decode, prefill

from kit.commands import cli_of
from sglang_tiered.tools.keygen import main
from sglang_tiered.wire.keys import load_keys

pytestmark = pytest.mark.timeout(60)


def test_keys_of_one_directory_let_both_roles_talk(tmp_path: Path) -> None:
    """Each role gets what the command says, and no more."""
    made, keys = tmp_path / "keys", {}
    assert main(["--out", str(made)]) == 0
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        (tmp_path / role).mkdir()
        for name in (f"{role}.key_secret", f"{other}.key"):
            shutil.copy(made / name, tmp_path / role)
        keys[role] = load_keys(tmp_path / role, role)
    with prefill(keys=keys["prefill"]) as sender, decode(keys=keys["decode"]) as receiver:
        sender.endpoint.expect_room(1)
        receiver.open(1, [sender], [1])
        sender.events.wait_for("ready", 1)


@pytest.mark.parametrize("role", [(), ("--role", "peer")])
def test_secret_keys_are_for_their_owner_alone(tmp_path: Path, role: tuple[str, ...]) -> None:
    before = os.umask(0)
    try:
        assert main([*role, "--out", str(tmp_path / "keys")]) == 0
    finally:
        os.umask(before)
    for path in (tmp_path / "keys").iterdir():
        readable = stat.S_IMODE(path.stat().st_mode) & 0o077
        assert bool(readable) == (path.suffix == ".key")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_keys_in_use_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path)])
    (tmp_path / "prefill.key").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "exists" in cli_of(main, capsys)("--out", tmp_path).refusal
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
