"""``Engine``: SGLang's in-process engine with the tiers below its radix cache.

It takes what ``sglang-tiered serve`` takes, less what concerns HTTP, as keyword arguments: SGLang's
by their names, ours with underscores (``tier_nvme_bytes="64GiB"``). Both come to the same settings.
Its calls of the tiers are those of ``sglang_tiered.client``.

    with sglang_tiered.Engine(model_path="M", tier_dir="/mnt/nvme/kv") as engine:
        answer = engine.generate("Once upon a time", {"max_new_tokens": 16})
        engine.pin(rid=answer["meta_info"]["id"], name="story", within_s=60)
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import operator
import os
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sglang_tiered import api
from sglang_tiered.client.calls import SyncCalls
from sglang_tiered.config import ENVIRONMENT_VARIABLE
from sglang_tiered.errors import ConfigError, RequestError
from sglang_tiered.integration import start
from sglang_tiered.integration.admin import service
from sglang_tiered.integration.admin.costs import ENVIRONMENT_VARIABLE as COSTS_VARIABLE
from sglang_tiered.integration.admin.costs import CostBoard, server_costs

start.prepare()  # before anything of SGLang is imported

from sglang.srt.arg_groups.arg_utils import record_fields  # noqa: E402
from sglang.srt.entrypoints.engine import Engine as SglangEngine  # noqa: E402
from sglang.srt.managers.io_struct import ShutdownReq  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes  # noqa: E402

from sglang_tiered.integration import resolve  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from sglang_tiered.client.calls import Request
    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.resolve import Resolved


T = TypeVar("T")

END_DEADLINE_S = 15.0
"""As long as SGLang's server gives its schedulers."""
_LOOK_S = 0.05
WHOSE = "the engine:"
_KINDS = {int: "a whole number", float: "a number"}
_NOT_IN_PROCESS = ("grpc_mode", "smg_grpc_mode", "grpc_port")

_place = threading.Lock()
_SECOND = (
    "this process runs an Engine already, and SGLang ends all children of a process with its "
    "engine; shut that one down first, or start the other in a process of its own."
)


class Engine(SyncCalls, SglangEngine):  # type: ignore[misc] # of SGLang nothing is typed
    """SGLang's ``Engine`` with the tiers, and the calls of the tiers. One at a time in a process.

    It holds the tier directory until ``shutdown``, which the end of a ``with`` statement and of the
    process call too. Raises ``ConfigError`` or ``StoreError`` for what the launcher refuses, before
    a model is loaded; a start that fails leaves no process and no lock. A call of the tiers raises
    ``RequestError``. Any thread may make one, but not one in which an event loop runs.
    """

    _held: ExitStack | None = None
    _turn: threading.Lock
    loop: Any

    def __init__(self, **keywords: Any) -> None:
        self._turn = threading.Lock()
        with ExitStack() as held:
            if not _place.acquire(blocking=False):
                raise ConfigError(_SECOND)
            held.callback(_place.release)
            fields, resolved = resolve_keywords(keywords)
            for note in resolved.notes:
                print(f"sglang-tiered: {note}", file=sys.stderr)
            server_args = ServerArgs(**fields)
            board = _prepare_tiers(server_args, resolved.config, held)
            self._costs = board, resolved.config
            self.tokenizer_manager = None  # for a start that fails before SGLang sets it
            held.callback(atexit.unregister, self.shutdown)
            held.callback(super().shutdown)
            super().__init__(server_args=server_args)
            own_loop: asyncio.AbstractEventLoop = self.loop
            self._own_loop, self.loop = own_loop, _InTurn(own_loop, self._turn)
            self._held = held.pop_all()

    def shutdown(self) -> None:
        """End the schedulers as a server does that is stopped, which keeps what is stored; then
        every child of this process, as SGLang does. May be called again."""
        held, self._held = self._held, None
        if held is None:
            if self._attached:
                super().shutdown()
            return
        with held:
            self._end_schedulers()

    def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        if self._held is None or self.tokenizer_manager is None:
            raise RequestError("this engine has no schedulers to ask: it was shut down")
        _refuse_within_a_loop()
        try:
            if request.call is api.CostsCall:
                costs = server_costs(*self._costs, draining=False)
                return 200, msgspec.to_builtins(costs), WHOSE
            call = api.decode(request.call, request.given())
            answering = service.answer(self.tokenizer_manager, call)
            # The loop that hears schedulers.
            loop = self.tokenizer_manager.event_loop or self._own_loop
            status, answer = run_on(loop, answering, self._turn, lambda: self._held is not None)
        except api.CallError as error:
            return error.status, {"error": str(error)}, WHOSE
        return status, answer, WHOSE

    def _end_schedulers(self) -> None:
        manager = self.tokenizer_manager
        if manager is None:
            return
        if manager._subprocess_watchdog is not None:  # noqa: SLF001
            manager._subprocess_watchdog.stop()  # noqa: SLF001

        async def tell() -> None:
            manager._dispatch_to_scheduler(ShutdownReq())  # noqa: SLF001

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            loop = self._own_loop
            run_on(asyncio.new_event_loop() if loop.is_closed() else loop, tell(), self._turn)
        else:
            manager._dispatch_to_scheduler(ShutdownReq())  # noqa: SLF001
        deadline = time.monotonic() + END_DEADLINE_S
        while collect_scheduler_processes() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _refuse_within_a_loop() -> None:
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise RequestError(
            "an event loop runs in this thread, which a call of the tiers would block; write "
            "await asyncio.to_thread(engine.pin, ...)"
        )


class _InTurn:
    """SGLang's event loop, for SGLang: calls of the tiers run it as well, each thread in its turn
    (``run_on``). A generation waits a moment for one, and would fail without."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turn: threading.Lock) -> None:
        self._loop = loop
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def run_until_complete(self, future: Any) -> Any:
        with self._turn:
            return self._loop.run_until_complete(future)


def run_on(
    loop: asyncio.AbstractEventLoop,
    call: Coroutine[Any, Any, T],
    turn: threading.Lock,
    is_open: Callable[[], bool] = lambda: True,
) -> T:
    """Return what a call comes to on a loop that another thread may run, or stop to run, meanwhile.
    Any thread but that; ``turn`` is the loop's. Raises ``RequestError`` if it is closed, and once
    the engine is shut down (not ``is_open``)."""
    try:
        future = asyncio.run_coroutine_threadsafe(call, loop)
    except RuntimeError as error:
        call.close()
        raise RequestError("the event loop of this engine is closed; start another") from error
    while not future.done():
        if not is_open():
            future.cancel()
            raise RequestError("this engine was shut down before it answered")
        if loop.is_running():
            wait([future], _LOOK_S)
            continue
        with turn, suppress(RuntimeError):  # a loop of the caller's is run without a turn
            _run_a_moment(loop, future)
    return future.result()


def _run_a_moment(loop: asyncio.AbstractEventLoop, future: Future[Any]) -> None:
    """Run a loop until a future of one of its calls is done, or others should have their turn."""
    is_over = loop.create_future()

    def end(_: Any = None) -> None:
        if not is_over.done():
            is_over.set_result(None)

    def end_soon(_: Any) -> None:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(end)

    future.add_done_callback(end_soon)
    loop.call_soon_threadsafe(lambda: loop.call_later(_LOOK_S, end))
    loop.run_until_complete(is_over)


def resolve_keywords(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], Resolved]:
    """Return the fields of SGLang's ``ServerArgs``, and what the command line of the same arguments
    resolves to. Raises ``ConfigError``; touches no tier."""
    fields = {field.name for field in record_fields(ServerArgs)}
    ours = {flag.dest for flag in resolve.ALL_FLAGS}
    if unknown := sorted(keywords.keys() - fields - ours):
        raise ConfigError(
            f"Engine knows no argument {unknown[0]}; see docs/flags.md and SGLang's ServerArgs."
        )
    given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in keywords.items()
        if value is not None
    }
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions}  # noqa: SLF001
    explicit = {
        name: _text(value) if name in ours else _value(value, actions.get(name))
        for name, value in given.items()
    }
    if "model_path" not in explicit:
        raise ConfigError("Engine needs model_path; pass the path or the name of a model.")
    if named := [name for name in _NOT_IN_PROCESS if explicit.get(name)]:
        raise ConfigError(f"{named[0]} is a server's, and an engine serves no one; drop it.")
    num_nodes: Any = explicit.get("nnodes", 1)
    if num_nodes > 1:
        raise ConfigError(f"nnodes={num_nodes} needs a server; an engine has one machine.")
    start.check_ports(explicit, serves_http=False)
    resolved = resolve.resolve_here(explicit, ())
    model = f"--model-path={explicit['model_path']}"  # which the parser asks for
    added = resolve.explicit_arguments(parser, [model, *resolved.sglang_arguments])
    of_sglang = {name: value for name, value in explicit.items() if name in fields}
    return {"log_level": "error", **added, **of_sglang}, resolved


def _prepare_tiers(server_args: ServerArgs, config: TieredConfig, held: ExitStack) -> CostBoard:
    """Do what the launcher does before a model is loaded; ``held`` undoes it."""
    start.claim_directory(config, held)
    settings, config = start.check(server_args, config)
    config.to_environment()
    held.callback(os.environ.pop, ENVIRONMENT_VARIABLE, None)
    start.remove_other_shards(config)
    board = held.enter_context(CostBoard.of_server(settings))
    board.to_environment()
    held.callback(os.environ.pop, COSTS_VARIABLE, None)
    return board


def _value(value: Any, action: argparse.Action | None) -> Any:
    """Return a value of SGLang's as its command line parses it. Raises ``ConfigError``."""
    if action is None or action.nargs is not None:
        return value
    kind: Any = action.type
    try:
        if isinstance(value, dict) and kind in (None, str):
            return json.dumps(value)
        if isinstance(value, str) and kind is not None:
            return kind(value)
        return operator.index(value) if kind is int else float(value) if kind is float else value
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        takes = _KINDS.get(kind, f"what {action.option_strings[0]} takes")
        raise ConfigError(f"{action.dest}={value!r:.60} is refused; pass {takes}.") from error


def _text(value: Any) -> str:
    """Return a value of Python as the command line has it."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)
