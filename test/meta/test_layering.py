"""Imports point one way. A walk over every import statement under python/ and kernels/.

launch_server -> integration -> {storage, policy, transfer, sharing, kernels}; sharing -> {storage,
transfer}; trace -> {storage, policy}; store -> storage. Nothing imports store.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (ROOT / "python", ROOT / "kernels")
OURS = "sglang_tiered"
KERNELS = "sglang_tiered_kernels"

# The only rooms that may import a dependency whose presence elsewhere would spread it.
HOMES = {
    "sglang": {"integration", "launch_server"},
    "torch": {"integration", "launch_server", KERNELS},
    "triton": {KERNELS},
    "zmq": {"transfer"},
    "redis": {"sharing"},
}

# The rooms a room may import. Modules at the top of the package (config, errors, metrics) are free
# to all, and are rooms of their own here so that they cannot lead around the rule.
MAY_IMPORT = {
    "launch_server": {"integration", "storage", "policy", "transfer", "sharing", KERNELS},
    "integration": {"storage", "policy", "transfer", "sharing", KERNELS},
    "storage": set(),
    "policy": set(),
    "transfer": set(),
    "sharing": {"storage", "transfer"},
    "trace": {"storage", "policy"},
    "store": {"storage"},
    KERNELS: set(),
}
# Above the package, or beside it: nothing in it may know them.
OUTSIDE = {"test", "benchmark", "scripts"}


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Absolute dotted names with their lines; `from a import b` gives both a and a.b."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *(node.module.split(".") if node.module else [])])
            yield node.lineno, origin
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            name = node.args[0]
            if called in {"importlib.import_module", "import_module", "__import__"} and (
                isinstance(name, ast.Constant) and isinstance(name.value, str)
            ):
                yield node.lineno, name.value


def room_of(module: str) -> str | None:
    """The room a module of ours is in; None for the package itself and for other people's."""
    parts = module.split(".")
    if parts[0] == KERNELS:
        return KERNELS
    return parts[1] if parts[0] == OURS and len(parts) > 1 else None


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    here = room_of(module)
    found: dict[tuple[int, str], str] = {}
    for line, target in imported_modules(source, module, is_package):
        top = target.split(".")[0]
        there = room_of(target)
        reason = None
        if top in HOMES and here not in HOMES[top]:
            reason = f"{top} belongs in {', '.join(sorted(HOMES[top]))} only"
        elif top in OUTSIDE:
            reason = f"nothing imports {top}"
        elif here == KERNELS and top == OURS:
            reason = f"kernels know nothing of {OURS}"
        elif there in MAY_IMPORT and there != here and there not in MAY_IMPORT.get(here or "", ()):
            reason = f"{here or OURS} must not import {there}"
        if reason:
            found.setdefault((line, reason), f"{module}:{line}: imports {target}: {reason}")
    return list(found.values())


def modules() -> Iterator[tuple[Path, str, bool]]:
    for root in SOURCE_ROOTS:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_no_module_imports_against_the_direction() -> None:
    checked = [
        line
        for path, module, is_package in modules()
        for line in violations(path.read_text(encoding="utf-8"), module, is_package)
    ]
    assert not checked, "\n".join(checked)


def test_the_walk_sees_both_source_roots() -> None:
    seen = {module for _, module, _ in modules()}
    assert {OURS, f"{OURS}.storage.base", KERNELS} <= seen


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_tiered.storage.base", "import sglang"),
        ("sglang_tiered.storage.base", "from sglang.srt.mem_cache import registry"),
        ("sglang_tiered.config", "import torch"),
        ("sglang_tiered.transfer.data", "import torch"),
        ("sglang_tiered.integration.plugin", "import triton.language as tl"),
        ("sglang_tiered.integration.kv_transfer", "import zmq.asyncio"),
        ("sglang_tiered.storage.base", "from ..policy import admission"),
        ("sglang_tiered.storage.region.store", "from ...policy.eviction import LRU"),
        ("sglang_tiered.policy.eviction", "from sglang_tiered.storage.base import TierEngine"),
        ("sglang_tiered.policy.eviction", "from sglang_tiered import storage"),
        ("sglang_tiered.storage.base", "import sglang_tiered.transfer.messages"),
        ("sglang_tiered.storage.base", "from .. import integration"),
        ("sglang_tiered.transfer.sessions", "from ..storage.base import TierEngine"),
        ("sglang_tiered.config", "from .integration import compat"),
        ("sglang_tiered.config", "from . import trace"),
        ("sglang_tiered.trace.replay", "from ..transfer import messages"),
        ("sglang_tiered.integration.hooks", "from ..trace.generator import generate"),
        ("sglang_tiered.integration.hooks", "from .. import launch_server"),
        ("sglang_tiered.storage.region.inspection", "from ...store import report"),
        ("sglang_tiered.launch_server", "from sglang_tiered.store.cli import main"),
        ("sglang_tiered.store.gc", "from sglang_tiered.integration import shards"),
        ("sglang_tiered.store.bench", "from ..policy import admission"),
        ("sglang_tiered.storage.layered.engine", "from ...sharing import peer_tier"),
        ("sglang_tiered.transfer.pages.server", "from ...storage.base import Run"),
        ("sglang_tiered.transfer.pages.client", "from ...sharing.settings import PeerSettings"),
        ("sglang_tiered.sharing.peer_tier", "from ..policy import cost_model"),
        ("sglang_tiered.sharing.peer_tier", "from ..integration import tier_stats"),
        ("sglang_tiered.sharing.peer_tier", "import zmq"),
        ("sglang_tiered.integration.tier_engines", "import redis"),
        ("sglang_tiered.storage.base", "import benchmark.harness"),
        ("sglang_tiered.storage.base", "from test.unit import double"),
        ("sglang_tiered_kernels.page_copy.interface", "import sglang"),
        ("sglang_tiered_kernels.page_copy.interface", "import sglang_tiered"),
        ("sglang_tiered_kernels.page_copy.interface", "from sglang_tiered.errors import X"),
        ("sglang_tiered.policy.admission", "def late():\n    import sglang.srt\n"),
        ("sglang_tiered.policy.admission", "import importlib\nimportlib.import_module('torch')"),
        (
            "sglang_tiered.storage.base",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        ),
    ],
)
def test_an_import_against_the_direction_is_caught(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1, (module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_tiered.launch_server", "import sglang\nfrom .integration import plugin"),
        ("sglang_tiered.integration.radix_cache", "from ..storage.base import TierEngine"),
        ("sglang_tiered.integration.radix_cache", "import torch\nimport sglang_tiered_kernels"),
        (
            "sglang_tiered.storage.region.store",
            "from ..base import TierEngine\nfrom . import index",
        ),
        ("sglang_tiered.storage.region.store", "from ...errors import TierError"),
        ("sglang_tiered.trace.replay", "from ..storage.memory import MemoryEngine"),
        ("sglang_tiered.store.scan", "from ..storage.region import inspection"),
        ("sglang_tiered.store.cli", "from sglang_tiered.store.gc import run"),
        ("sglang_tiered.transfer.data", "import zmq"),
        ("sglang_tiered.sharing.locality.connection", "import redis"),
        (
            "sglang_tiered.sharing.peer_tier",
            "from ..storage.base import Run\nfrom ..transfer import x",
        ),
        ("sglang_tiered.integration.tier_engines", "from ..sharing.settings import PeerSettings"),
        ("sglang_tiered_kernels.page_copy.triton_kernel", "import torch\nimport triton"),
        ("sglang_tiered.policy.cost_model", "from sglang_tiered import __version__"),
    ],
)
def test_an_import_along_the_direction_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_relative_import_in_a_package_counts_from_the_package() -> None:
    source = "from .base import TierEngine\nfrom ..policy import admission"
    assert violations(source, "sglang_tiered.storage", is_package=True) == [
        "sglang_tiered.storage:2: imports sglang_tiered.policy: storage must not import policy"
    ]
