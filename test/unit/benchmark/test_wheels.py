"""What a machine lacks is gathered, and nothing that it has."""

from __future__ import annotations

from gpu_report import wheels
from gpu_report.wheels import WANTED, Wheel, missing, read_have


def test_what_the_machine_has_stays_away() -> None:
    versions = {"transformers": "5.19.0", "numpy": "2.3.5", "regex": "1.0", "torch": "2.14.1"}
    found = [Wheel(name, version, ()) for name, version in versions.items()]
    requiring = [
        Wheel("sglang", "0.5.23", ("transformers==5.19.0", "numpy", "torch==2.14.1")),
        Wheel("transformers", "5.19.0", ("numpy>=1.26", 'regex<0; python_version < "3.12"')),
    ]
    have = read_have("torch==2.11.0+cu130\ntransformers==5.17.0\nNumPy==2.5.2\nRegex==2.0\n")
    lacking = missing(found, have, requiring)
    assert [wheel.name for wheel in lacking] == ["transformers"]  # torch is that machine's own


def test_everything_gathered_has_a_pin() -> None:
    """An unpinned one would be whatever is newest on the day."""
    assert set(WANTED) <= wheels._pins().keys()
