"""SGLang on a CPU: platform, host copies, operators that have no CPU version."""

from __future__ import annotations
