"""(e) The real server with tiers: what comes back sooner than it is computed, and mixed batches.

A model of Llama-3-8B's shape with random weights. The first server has SGLang's own attention
backend, the second, after ``kill -9``, ``pod``; both mix chunks.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import mmap
import os
import random
import statistics
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gpu_report.disk import takes_direct
from gpu_report.figures import Part, SkippedError, run_part
from server_process import Server
from sglang_tiered.integration import plugin

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_report.random_model import Shape
    from server_process import Answer

CHECKPOINT_DEADLINE_S = 60.0
START_DEADLINE_S = 150.0
READ_BYTES, READ_THREADS = 16 << 20, 4
HOST_PROMPTS, DEVICE_PROMPTS = 12, 2
"""Prompts that each pool holds, and the device's half of one more. In host memory all of them have
room. Said, since SGLang sizes that pool by memory that is free, which a machine may only show once
it is used."""
UNKNOWN_DISK = 1e9


class World:
    """One server at a time over one tier directory, and the prompts."""

    def __init__(self, part: Part, shape: Shape) -> None:
        self.part, self.shape = part, shape
        self.length = part.size(8192, 8192, 512)
        source = random.Random(7)
        self._tokens = lambda count: [source.randrange(3, shape.vocabulary) for _ in range(count)]
        self.prompts = [self._tokens(self.length) for _ in range(part.size(5, 3, 3))]
        self.answers: list[list[int]] = []
        self.num_compared = self.num_equal = 0
        self.prefill_s = self.read_s = 0.0
        self.server: Server | None = None

    def tokens(self, count: int) -> list[int]:
        return self._tokens(count)

    @property
    def model(self) -> Path:
        """Beside the part's own folder, where it stays for the next run."""
        return (
            self.part.folder / "model" if self.part.rehearse else self.part.folder.parent / "model"
        )

    def start(self, number: int, *more: str) -> Server:
        """Raises ``RuntimeError`` if it does not come up, with why and the end of its log, which
        stays with the figures: a part that could not measure has failed."""
        part, device = self.part, DEVICE_PROMPTS * self.length + self.length // 2
        flags = [
            *("--dtype", str(self.shape.dtype).removeprefix("torch.")),
            *("--skip-tokenizer-init", "--page-size", "64", "--max-total-tokens", str(device)),
            *("--tier-dir", str(part.folder / "tier"), "--tier-nvme-bytes", "20GiB"),
            *("--tier-host-bytes", str(HOST_PROMPTS * self.length * self.shape.kv_bytes)),
            *("--enable-mixed-chunk", "--chunked-prefill-size", str(part.size(2048, 2048, 256))),
        ]
        log = part.file.with_name(f"server-{number}.log")
        self.server = server = Server.spawn(self.model, log, *flags, *more)
        with part.file.with_suffix(".servers").open("a") as file:  # for who stops this part
            file.write(f"{server.process.pid}\n")
        begin = time.perf_counter()
        try:
            server.wait_until_it_generates(START_DEADLINE_S)
        except AssertionError as error:
            said = str(error)
            raise RuntimeError(
                f"server {number}: {said.splitlines()[0][:200]} ... {said[-900:]}"
            ) from error
        part.save(f"server_{number}_start", time.perf_counter() - begin, "s")
        return server

    def ttft(self, server: Server, index: int) -> tuple[float, Answer]:
        begin = time.perf_counter()
        answer = server.generate(self.prompts[index], 1)
        spent = time.perf_counter() - begin
        if index < len(self.answers):
            self.num_compared += 1
            self.num_equal += answer.output_ids == self.answers[index]
        else:
            self.answers.append(answer.output_ids)
        return spent, answer

    def pass_over(self, server: Server, name: str, tier: str) -> list[float]:
        """Each prompt once; how much came from where is said with the times."""
        found = [self.ttft(server, index) for index in range(len(self.prompts))]
        share = statistics.median(answer.cached[tier] for _, answer in found) / self.length
        times = [spent for spent, _ in found]
        self.part.save_samples(f"ttft_{name}", times, "s", share_of_prompt=share)
        return times


def run(part: Part) -> None:
    if importlib.util.find_spec("sglang") is None:
        raise SkippedError("sglang is not installed; scripts/gpu_pack packs it")
    try:
        importlib.metadata.version("sglang-tiered")
    except importlib.metadata.PackageNotFoundError:
        raise SkippedError(
            "this package is not installed (pip install --no-deps -e .), and SGLang finds its "
            "platform and its tiers by its entry points only"
        ) from None
    if not part.rehearse and plugin.lacks_kernels():
        part.skip("compiled_kernels", "sgl_kernel is not installed: PyTorch, Triton, no CUDA graph")
    from gpu_report.random_model import LLAMA_8B, TINY, write_model

    world = World(part, TINY if part.rehearse else LLAMA_8B)
    begin = time.perf_counter()
    write_model(world.model, world.shape)
    part.save("model_written", time.perf_counter() - begin, "s")
    try:
        forced = ("--tier-load", "always")
        server = world.start(1, *(forced if part.rehearse else ()))  # tiny prompts never pay
        _returns(world, server)
        _users(world, server)
        default_s = _mixed(world, server, "default")
        server.kill()
        server = world.start(2, "--attention-backend", "pod", *forced)
        loaded_s = _compare(world, "nvme_forced", world.pass_over(server, "nvme_forced", "storage"))
        part.save("nvme_forced_over_reading", loaded_s / world.read_s, "ratio")
        pod_s = _mixed(world, server, "pod")
        part.save("mixed_pod_over_default", pod_s / default_s, "ratio")
        state = server.request("/server_info")["internal_states"][0]["sglang_tiered_pod"]
        part.save("mixed_pod_layers", state["layers"], "layers", left=state["other_layers"])
    finally:
        part.save("answers_equal", world.num_equal, "answers", of=world.num_compared)
        if world.server is not None:
            with contextlib.suppress(OSError):
                world.server.kill()
    if part.rehearse and world.num_equal < world.num_compared:
        raise RuntimeError("an answer in float32 changed with the tier that its prompt came from")


def _returns(world: World, server: Server) -> None:
    part = world.part
    server.generate(world.tokens(world.length), 1)  # compiles what it needs
    computed, device = [], []
    for index, prompt in enumerate(world.prompts):
        computed.append(world.ttft(server, index)[0])
        _checkpoint(server, prompt)  # no copy is under way when it returns
        device.append(world.ttft(server, index)[0])
    for _ in range(DEVICE_PROMPTS):  # so that the prompts have left the device
        other = world.tokens(world.length)
        server.generate(other, 1)
        _checkpoint(server, other)
    part.save_samples("ttft_computed", computed, "s", tokens=world.length)
    part.save_samples("ttft_device", device, "s")
    host = world.pass_over(server, "host", "host")
    world.prefill_s = statistics.median(computed)
    part.save("host_over_computed", statistics.median(host) / world.prefill_s, "ratio")
    world.read_s = world.length * world.shape.kv_bytes / _read_rate(part)
    server.flush()
    loaded_s = _compare(world, "nvme", world.pass_over(server, "nvme", "storage"))
    both_ends_s = world.prefill_s * world.read_s / (world.prefill_s + world.read_s)
    part.save("nvme_over_both_ends_bound", loaded_s / both_ends_s, "ratio", read_s=world.read_s)


def _compare(world: World, name: str, loaded: list[float]) -> float:
    """Loaded by the server's own choice (``nvme``), or where it must load all (``nvme_forced``,
    after ``kill -9``), over computing. Returns the seconds."""
    loaded_s = statistics.median(loaded)
    world.part.save(f"{name}_over_computed", loaded_s / world.prefill_s, "ratio")
    return loaded_s


def _checkpoint(server: Server, prompt: list[int]) -> None:
    """Until the prompt is durable: its copy to host memory may still be under way."""
    deadline = time.monotonic() + CHECKPOINT_DEADLINE_S
    while True:
        try:
            server.request("/tier/checkpoint", {"input_ids": prompt})
            return
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise RuntimeError(f"checkpoint: {error.read().decode()[:300]}") from error
            time.sleep(0.1)


def _read_rate(part: Part) -> float:
    """Bytes a second of the tier's disk, by a few threads with ``O_DIRECT``; a guess without."""
    if not takes_direct(part.folder):
        part.skip("disk_read", f"no O_DIRECT there; taken for {UNKNOWN_DISK / 1e9:.0f} GB/s")
        return UNKNOWN_DISK
    path, count = part.folder / "raw", part.size(64, 64, 4)
    blocks = [mmap.mmap(-1, READ_BYTES) for _ in range(READ_THREADS)]
    blocks[0].write(os.urandom(READ_BYTES))
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        for number in range(count):
            os.pwrite(file, blocks[0], number * READ_BYTES)
        os.fsync(file)

        def read(thread: int) -> None:
            for number in range(thread, count, READ_THREADS):
                os.preadv(file, [blocks[thread]], number * READ_BYTES)

        begin = time.perf_counter()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(read, range(READ_THREADS)))
        rate = count * READ_BYTES / (time.perf_counter() - begin)
    finally:
        os.close(file)
        path.unlink()
    part.save("disk_read", rate / 1e9, "GB/s")
    return rate


def _users(world: World, server: Server) -> None:
    """Conversations side by side: the first turn is computed, later ones bring a longer prompt."""
    part = world.part
    num_users, turns = part.size(16, 8, 3), part.size(4, 3, 2)
    step = world.length // 8
    prompts = [world.tokens(2 * step) for _ in range(num_users)]
    for turn in range(turns):
        with ThreadPoolExecutor(num_users) as pool:

            def ask(prompt: list[int]) -> float:
                begin = time.perf_counter()
                server.generate(prompt, 1)
                return time.perf_counter() - begin

            times = list(pool.map(ask, prompts))
        part.save_samples(f"users_{num_users}_turn_{turn + 1}", times, "s")
        prompts = [prompt + world.tokens(step) for prompt in prompts]


def _mixed(world: World, server: Server, name: str) -> float:
    """Seconds for prompts that arrive while others decode."""
    part = world.part
    count, length, num_new = part.size(24, 12, 4), part.size(1536, 1536, 160), part.size(64, 48, 6)
    prompts = [world.tokens(length) for _ in range(count)]
    server.generate_all(prompts[:2], concurrency=2, num_new=2)
    begin = time.perf_counter()
    server.generate_all(prompts, concurrency=part.size(8, 8, 4), num_new=num_new)
    spent = time.perf_counter() - begin
    part.save(f"mixed_{name}", count * num_new / spent, "tokens/s")
    return spent


if __name__ == "__main__":
    run_part("server", run)
