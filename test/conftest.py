"""Fixtures every test may use: a clean environment."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from kit import coverage_figure

if TYPE_CHECKING:
    from zygote import Zygotes


def pytest_configure(config: pytest.Config) -> None:
    """A job that a script starts in the background inherits SIGINT as ignored, and every process
    that a test means to interrupt would too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(coverage_figure)
    # How long an example takes is up to who else computes here.
    hypothesis.settings.register_profile("any time", deadline=None)
    hypothesis.settings.load_profile("any time")
    gc.disable()  # what is collected stays, and looking for garbage in it is half of the time
    config.add_cleanup(gc.unfreeze)  # or libraries take what is left at the end for leaks


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def environment_of_nobody() -> Iterator[None]:
    """A developer's SGLANG_* variables must not decide what a test sees, nor those that SGLang sets
    as tests are collected: what fixtures start and what tests start would have two environments,
    and so two zygotes."""
    with pytest.MonkeyPatch.context() as patch:
        _clean(patch)
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(extensions_folder()))
        # As scripts/test has it: by another ninja all is built anew as well.
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        yield


def extensions_folder() -> Path:
    """Where SGLang's C++ extension lies once it is built, for this environment alone: two checkouts
    that share a folder build it anew at start after start, for ten seconds each."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = sys.prefix.strip(os.sep).replace(os.sep, "-")
    return cache / "sglang-tiered" / "torch_extensions" / name


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those that another test leaves."""
    _clean(monkeypatch)


def _clean(patch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        patch.delenv(name)


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygotes]:
    """For programs that import SGLang, once for all of them."""
    from zygote import Zygotes

    made = Zygotes(tmp_path_factory.mktemp("zygotes") / "log")
    yield made
    made.close()
