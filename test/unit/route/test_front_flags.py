"""What cannot work is refused with one sentence before anything is opened."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from kit.commands import cli_of, ran
from sglang_tiered.route.cli import main


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--servers is missing"),
        (["--servers", "FOLDER/bad"], "'https://a:1', which is no URL of a server"),
        (["--servers", "http://a"], "is neither a file, nor dns://NAME:PORT, nor redis://HOST"),
        (["--servers", "redis://:secret@"], "the URL of the Redis (--tier-index, --servers"),
        (["--servers", "FOLDER/good", "--balance-floor", "2"], "nothing without --balance on"),
        (["--servers", "FOLDER/good", "--tokenizer", "FOLDER"], "no tokenizer.json"),
        (["--servers", "FOLDER/good", "--classes", "FOLDER/bad"], "cannot be used: Expected"),
        (["--servers", "FOLDER/good", "--server-key-file", "FOLDER/empty"], "holds no key"),
        (["--servers", "FOLDER/good", "--host", "localhost"], "--host localhost is no IP address"),
    ],
)
def test_unusable_flags_get_one_sentence(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").write_text("- https://a:1\n")
    (tmp_path / "good").write_text("# none yet\n- http://127.0.0.1:1\n")
    (tmp_path / "empty").write_text("\n")
    given = [flag.replace("FOLDER", str(tmp_path)) for flag in flags]
    assert said in cli_of(main, capsys)("serve", *given, "--envoy", "off").refusal


def test_taken_port_and_bad_certificate_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("envoy")
    (tmp_path / "servers").write_text("")
    given, cli = ("serve", "--servers", tmp_path / "servers"), cli_of(main, capsys)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "stop what listens" in cli(*given, "--port", taken.getsockname()[1]).refusal
    files = [word for name in ("cert", "key") for word in (f"--ssl-{name}file", f"{tmp_path}/no")]
    assert "name a certificate and its key" in cli(*given, *files).refusal


def test_front_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import json, sys\n"
        "import sglang_tiered.route.envoy, sglang_tiered.route.service\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    ended = ran(sys.executable, "-c", code, check=True)
    assert not {"torch", "sglang", "transformers"} & set(json.loads(ended.stdout))
