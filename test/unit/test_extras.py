"""Without the packages of the extras everything else works, and what needs one says so at once."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kit.commands import ran

WITHOUT_THEM = """
import contextlib, gc, importlib, importlib.machinery, io, json, pkgutil, sys

gc.disable()  # nothing of what is imported is garbage

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.split(".")[0] in {"matplotlib", "obstore", "redis", "shtab"}:
            return None
        return super().find_spec(fullname, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder

failed = {}
for package in ("sglang_tiered", "sglang_tiered_lab"):
    path = importlib.import_module(package).__path__
    for found in pkgutil.walk_packages(path, f"{package}."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            failed[found.name] = error.name

ended = []
for module, arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = importlib.import_module(module).main(arguments)
    ended.append((code, said.getvalue()))
json.dump([failed, ended], sys.stdout)
"""
SERVER = ("sglang_tiered.launch_server", "--model-path", "no/model", "--port", "0")
BUCKET = ("--tier-object-url", "s3://bucket/kv")
CASES = (
    ("--tier-object-url", "obstore", "object", (*SERVER, *BUCKET)),
    ("the object tier", "obstore", "object", ("sglang_tiered.tools.store.cli", "stat", BUCKET[1])),
    ("--tier-index", "redis", "peers", (*SERVER, "--tier-index", "redis://localhost")),
    ("completion", "shtab", "tools", ("sglang_tiered.completion", "bash")),
)


@pytest.fixture(scope="module")
def without_them() -> tuple[dict[str, str], list[tuple[int, str]]]:
    """What did not import, by what it missed; and exit code and stderr of each case. One process
    for all, as SGLang takes seconds to import."""
    runs = [(module, arguments) for _, _, _, (module, *arguments) in CASES]
    ended = ran(
        sys.executable, "-W", "ignore", "-c", WITHOUT_THEM, input=json.dumps(runs), timeout_s=200
    )
    assert ended.returncode == 0, ended.stderr
    failed, outcomes = json.loads(ended.stdout.splitlines()[-1])
    return failed, outcomes


def test_only_redis_rooms_need_an_extra(without_them: Any) -> None:
    failed = dict(without_them[0])
    # Imported where SGLang takes FlashAttention, which is of its kernels for GPUs.
    assert failed.pop("sglang_tiered.integration.attention.pod_flash", "sgl_kernel") == "sgl_kernel"
    assert set(failed) == {"sglang_tiered.sharing.membership"}
    assert set(failed.values()) == {"redis"}


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join(case[3][-2:]) for case in CASES])
def test_missing_extra_is_refused_in_one_sentence(without_them: Any, case: int) -> None:
    feature, package, extra, _ = CASES[case]
    code, said = without_them[1][case]
    assert code == 2
    assert said == (
        f"sglang-tiered: {feature} needs the package {package}; "
        f"pip install 'sglang-tiered[{extra}]'.\n"
    )
