"""Packages that only some features need: what the extras of this package install."""

from __future__ import annotations

import importlib.util

from sglang_tiered.errors import ConfigError

EXTRAS = {
    "aiohttp": "route",
    "envoy": "route",
    "grpc": "route",
    "jinja2": "route",
    "matplotlib": "plot",
    "obstore": "object",
    "pyarrow": "parquet",
    "redis": "peers",
    "shtab": "tools",
}
"""Names of extras in ``pyproject.toml``, by the package to import that each is for."""


def require(feature: str, package: str) -> None:
    """Raises ``ConfigError`` without the package. Imports nothing, so that it can be asked before
    anything else is done."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{feature} needs the package {package}; "
            f"pip install 'sglang-tiered[{EXTRAS[package]}]'."
        )
