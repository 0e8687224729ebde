"""Classes of requests: who may claim which, and files that say no."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.route.settings import LIMIT_HEADER, Classes

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
