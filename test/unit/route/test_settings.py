"""What cannot work is refused with one sentence before anything is opened; the rest counts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.commands import cli_of, ran
from sglang_tiered.errors import ConfigError
from sglang_tiered.route.cli import main
from sglang_tiered.route.settings import LIMIT_HEADER, Classes, Source

# ---- Flags ----


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
        (["--servers", "FOLDER/good", "--picker-host", "a"], "--picker-host a is no IP address"),
        (["--servers", "FOLDER/good", "--port", "65534"], "65534 must be from 1 to 65533"),
        (["--servers", "FOLDER/good", "--pick-timeout", "1m"], "1m must be from 0.01s to 10s"),
        (["--servers", "FOLDER/good", "--balance-cooldown", "9s"], "9s must be from 10s to"),
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


# ---- Servers ----


NAMES = {"one.test": "192.0.2.1", "two.test": "192.0.2.2", "six.test": "2001:db8::6"}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the DNS knows. A test changes it."""
    known = dict(NAMES)

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        rest = (0, 0) if ":" in known[host] else ()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port, *rest))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def resolved(source: Source) -> dict[str, str]:
    # The loop that SGLang's import makes the default asks the system, not what is patched here.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(source.resolved())


def test_lists_of_urls_are_read(tmp_path: Path, names: dict[str, str]) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text("# two\n- http://one.test:1\n\n- 'http://six.test:2/'  # the last\n")
    assert resolved(Source(str(file))) == {
        "192.0.2.1:1": "http://one.test:1",
        "[2001:db8::6]:2": "http://six.test:2",
    }


def test_lost_name_holds_up_no_other(tmp_path: Path, names: dict[str, str]) -> None:
    file = tmp_path / "servers"
    file.write_text("http://absent.test:1\nhttp://one.test:1\n")
    source = Source(str(file))
    assert resolved(source) == {"192.0.2.1:1": "http://one.test:1"}
    del names["one.test"]
    names["absent.test"] = "192.0.2.9"
    both = {"192.0.2.9:1": "http://absent.test:1", "192.0.2.1:1": "http://one.test:1"}
    assert resolved(source) == both
    names["one.test"] = "192.0.2.7"
    assert resolved(source)["192.0.2.7:1"] == "http://one.test:1"


def test_addresses_of_a_name_are_servers(names: dict[str, str]) -> None:
    source = Source("dns://two.test:30000")
    assert resolved(source) == {"192.0.2.2:30000": "http://192.0.2.2:30000"}
    del names["two.test"]
    with pytest.raises(OSError, match="unknown"):
        resolved(source)


# ---- Classes ----


DIGEST = hashlib.sha256(b"secret").hexdigest()
GOOD = f"""\
default: batch
classes:
  soon: {{ttft: 1.5s, priority: 10, sha256: [{DIGEST}]}}
  batch: {{shed: false}}
"""


def read(tmp_path: Path, text: str) -> Classes:
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    return Classes(str(path))


def test_a_key_claims_its_class_alone(tmp_path: Path) -> None:
    classes = read(tmp_path, GOOD)
    soon = classes.of({"authorization": "Bearer secret"})
    assert (soon.name, soon.limit_s, soon.priority, soon.is_sheddable) == ("soon", 1.5, 10, True)
    for given in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic secret"}):
        assert classes.of(given).name == "batch"
    assert not classes.of({}).is_sheddable


def test_no_class_leaves_priority_to_the_client(tmp_path: Path) -> None:
    """A body may name one as well; what the front says in a header counts more."""
    classes = read(tmp_path, GOOD)
    assert classes.of({}).priority == 0, "another class has one"
    assert read(tmp_path, "default: a\nclasses: {a: {ttft: 1s}}").of({}).priority is None


def test_a_header_shortens_the_limit_only(tmp_path: Path) -> None:
    classes = read(tmp_path, GOOD)
    mine = {"authorization": "bearer secret"}
    for asked, limit_s in (("500", 0.5), ("9000", 1.5), ("0", 1.5), ("soon", 1.5), ("-1", 1.5)):
        assert classes.of({**mine, LIMIT_HEADER: asked}).limit_s == limit_s
    assert Classes(None).of({LIMIT_HEADER: "500"}).limit_s == 0.5
    assert Classes(None).of({}).limit_s is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "expected the node content"),
        ("default: b\nclasses: {a: }", "default is 'b', which is none of its classes"),
        ("default: a\nclasses: {a: {ttfb: 3}}", "class a: Object contains unknown field `ttfb`"),
        ("default: a\nclasses: {a: {priority: true}}", "got `bool` - at `$.priority`"),
        ("default: a\nclasses: {a: {sha256: [abc]}}", "matching regex '^[0-9a-f]{64}$'"),
        ("default: a\nclasses: {a: &a {sha256: [" + DIGEST + "]}, b: *a}", "digest of two classes"),
    ],
)
def test_wrong_files_are_refused_with_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used: .*No such file"):
        Classes(str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert said in str(refused.value) and "\n" not in str(refused.value)
