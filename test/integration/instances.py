"""Prefill and decode servers that tests share, and what every pair of them must do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conftest import make_prompts
from prefill_decode import PrefillDecode, spawn_role, transfer_state
from server_process import Server, free_port

if TYPE_CHECKING:
    from pathlib import Path


LENGTHS = (1, 2, 15, 63, 64, 65, 511, 512, 513, 1500)
COMMON = ("--tier-mode", "off", "--max-total-tokens", "8192", "--chunked-prefill-size", "512")
MAX_INSTANCES = 3  # alive at once: one takes 1.9 GB, of two ranks 2.6 GB


class Instances:
    """Prefill and decode servers by their flags. Any prefill may be paired with any decode, so an
    instance stays for the pairs to come, until it is the one that was used longest ago."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._alive: dict[tuple[str, tuple[str, ...]], tuple[Server, int]] = {}
        self._num_started = 0

    def pair(self, prefill: tuple[str, ...], decode: tuple[str, ...]) -> PrefillDecode:
        keys = [("prefill", prefill), ("decode", decode)]
        held = {key: self._alive.pop(key) for key in keys if key in self._alive}
        held = {key: one for key, one in held.items() if one[0].process.poll() is None}
        while len(self._alive) > MAX_INSTANCES - len(keys):
            self._alive.pop(next(iter(self._alive)))[0].kill()
        for key in keys:
            self._alive[key] = held.get(key) or self._spawn(*key)
        (first, port), (second, _) = (self._alive[key] for key in keys)
        pair = PrefillDecode(self._model, self._folder, (), port, first, second)
        pair.wait_until_ready()
        return pair

    def _spawn(self, role: str, flags: tuple[str, ...]) -> tuple[Server, int]:
        port = free_port()
        log = self._folder / f"{role}-{self._num_started}.log"
        self._num_started += 1
        return spawn_role(self._model, log, role, port, (*COMMON, *flags)), port

    def kill(self) -> None:
        for server, _ in self._alive.values():
            server.kill()


def hands_over_what_one_server_computes(pair: PrefillDecode, single: Server, seed: int) -> None:
    """``seed``: another for every pair with one of these instances, or it holds the pages already
    and nothing is handed over."""
    prompts = [make_prompts(seed + length, 1, length)[0] for length in LENGTHS]
    prompts += [prompts[-1][:700] + make_prompts(seed, 1, 50)[0]]  # shares a prefix
    expected = [answer.output_ids for answer in single.generate_all(prompts)]
    num_done = transfer_state(pair.decode)["transfer_rooms_ended:done"]
    got = [reply.output_ids for reply in pair.generate_all(prompts)]
    assert got == expected
    state = transfer_state(pair.decode)
    assert state["transfer_rooms_ended:done"] >= num_done + len(prompts)
    assert state["transfer_rooms"] == 0
