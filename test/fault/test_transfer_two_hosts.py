"""Prefill in a network namespace of its own, over a link that is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from transfer_child import SHAPE, Child, hand_over
from transfer_pair import IMPATIENT, Decode, decode

from kit.waiting import eventually

pytestmark = pytest.mark.timeout(120)

# Addresses that are nobody's (RFC 5737), and names, of this process: another that runs these tests
# meanwhile hardly ever has the same.
SUBNET = os.getpid() % 64 * 4
HERE, THERE = f"198.51.100.{SUBNET + 1}", f"198.51.100.{SUBNET + 2}"
NAMESPACE = f"kv-{os.getpid()}"
LINK, FAR_LINK = f"kva{os.getpid() % 10**8}", f"kvb{os.getpid() % 10**8}"


def run(command: str) -> str | None:
    """What went wrong, or None."""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=20, check=False)
    return None if done.returncode == 0 else f"{command}: {done.stderr.strip()}"


@pytest.fixture(scope="module")
def link() -> Iterator[None]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and ip(8) to make a network namespace")
    steps = (
        f"ip netns add {NAMESPACE}",
        f"ip link add {LINK} type veth peer name {FAR_LINK} netns {NAMESPACE}",
        f"ip addr add {HERE}/30 dev {LINK}",
        f"ip link set {LINK} up",
        f"ip -n {NAMESPACE} addr add {THERE}/30 dev {FAR_LINK}",
        f"ip -n {NAMESPACE} link set {FAR_LINK} up",
    )
    try:
        for step in steps:
            problem = run(step)
            if problem is not None:
                pytest.skip(f"this machine does not let a test make a network ({problem})")
        yield
    finally:
        run(f"ip link del {LINK}")
        run(f"ip netns del {NAMESPACE}")


@pytest.fixture
def far(link: None) -> Iterator[Child]:
    with Child("prefill", host=THERE, prefix=("ip", "netns", "exec", NAMESPACE)) as child:
        yield child


@pytest.fixture
def receiver() -> Iterator[Decode]:
    with decode(SHAPE, settings=replace(IMPATIENT, allowed_networks=(THERE,))) as one:
        yield one


def test_a_cut_link_fails_rooms_until_mended(far: Child, receiver: Decode) -> None:
    hand_over(far, receiver, 1)
    far.opens(receiver, 2)
    assert run(f"ip link set {LINK} down") is None
    try:
        reason = receiver.events.wait_for("failed", 2, IMPATIENT.peer_timeout_s + 3)[2]
        assert "silent" in reason or "closed" in reason
        far.tell("failed 2")
        assert "decode instance" in far.wait_for("failed")
        eventually(lambda: receiver.endpoint.num_sessions == 0)
    finally:
        assert run(f"ip link set {LINK} up") is None
    hand_over(far, receiver, 3)
