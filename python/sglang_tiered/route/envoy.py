"""Envoy: its configuration, the files in which it finds the servers, and ``run_front``.

That runs Envoy and the picker as two children. When the picker dies Envoy goes on by itself, and
the picker is started again; when Envoy ends, or this process, so does the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang_tiered.route.settings import RouteConfig


DESTINATION, PREFILLER = "x-gateway-destination-endpoint", "x-prefiller-host-port"
SUBSET = "x-gateway-destination-endpoint-subset"
OWN_HEADERS = (
    DESTINATION,
    PREFILLER,
    SUBSET,
    "x-override-rid",
    "x-override-bootstrap-host",
    "x-override-bootstrap-port",
    "x-override-bootstrap-room",
    "x-override-conversation-id",
    "x-override-priority",
    "x-override-routed-dp-rank",
    "x-override-disagg-prefill-dp-rank",
)
"""What no client may say. ``x-override-*`` change a request within SGLang."""

CLUSTERS = ("pool", "decode", "prefill")
"""A file each; ``pool`` holds the servers that do both."""

START_S = 30.0
LOOK_S = 0.05
AGAIN_S = 0.5
STOP_S = 5.0
GRACE_S = 3
"""How long a stopped front takes connections: not everybody has heard of its end."""

logger = logging.getLogger(__name__)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ``ValueError``."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def write_members(directory: Path, cluster: str, addresses: Iterable[str]) -> None:
    """Have the file of a cluster name these ``IP:PORT``. Envoy sees one that differs."""
    hosts = []
    for address in sorted(addresses):
        host, port = split_address(address)
        there = {"socket_address": {"address": host, "port_value": port}}
        hosts.append({"endpoint": {"address": there}})
    assignment = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": cluster,
        "endpoints": [{"lb_endpoints": hosts}],
    }
    text, file = json.dumps({"resources": [assignment]}), directory / f"{cluster}.json"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        new = directory / f".{cluster}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, file)


def read_members(directory: Path) -> dict[str, str]:
    """Return the clusters of the servers that an earlier picker wrote, by their ``IP:PORT``."""
    found = {}
    for cluster in CLUSTERS:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            text = (directory / f"{cluster}.json").read_text(encoding="utf-8")
            (told,) = json.loads(text)["resources"][0]["endpoints"]
            for host in told["lb_endpoints"]:
                there = host["endpoint"]["address"]["socket_address"]
                name, port = there["address"], there["port_value"]
                found[f"[{name}]:{port}" if ":" in name else f"{name}:{port}"] = cluster
    return found


def configuration(config: RouteConfig, directory: Path, members: Path) -> dict[str, Any]:
    """Return the whole configuration. The admin interface is a socket in ``directory``."""
    text = (resources.files(__package__) / "envoy.yaml").read_text(encoding="utf-8")
    told = {
        "admin": str(directory / "admin"),
        "members": str(members),
        "host": config.host,
        "port": config.port,
        "picker_host": config.picker_host,
        "picker_port": config.grpc_port,
        "pick_timeout": f"{config.pick_s:g}s",
        "prefiller": PREFILLER,
        "certificate": config.certificate,
        "certificate_key": config.certificate_key,
        "stripped": [{"remove": header} for header in OWN_HEADERS],
    }
    template = yaml.safe_load(text)
    parts = template.pop("parts")
    if config.certificate is not None:
        template["static_resources"]["listeners"][0]["filter_chains"][0] |= parts["tls"]
    made: dict[str, Any] = _filled(template, told)
    for cluster in CLUSTERS:
        told |= {"cluster": cluster, "file": str(members / f"{cluster}.json")}
        told["named_in"] = PREFILLER if cluster == "prefill" else DESTINATION
        made["static_resources"]["clusters"].append(_filled(parts["servers"], told))
    return made


def _filled(part: Any, told: dict[str, Any]) -> Any:
    if isinstance(part, dict):
        return {name: _filled(value, told) for name, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, told) for value in part]
    is_filled_in = isinstance(part, str) and part.startswith("$")
    return told[part[1:]] if is_filled_in else part


def run_front(config: RouteConfig, arguments: Sequence[str]) -> int:
    """Run until SIGTERM. ``arguments`` are those of the command, for the picker. Returns the exit
    code; raises ``ConfigError``."""
    program = program_of(config)
    _require_certificate(config)
    _require_free(config.host, config.port)
    with tempfile.TemporaryDirectory(prefix="sglang-tiered-route-") as directory:
        folder = Path(directory)
        members = folder / "members" if config.members is None else Path(config.members)
        members.mkdir(parents=True, exist_ok=True)
        for cluster in CLUSTERS:  # of an earlier run
            (members / f"{cluster}.json").unlink(missing_ok=True)
        path = folder / "envoy.json"
        path.write_text(json.dumps(configuration(config, folder, members)), encoding="utf-8")
        return asyncio.run(_Front(config, program, path, members, arguments).run())


def program_of(config: RouteConfig) -> str:
    """Return the path of Envoy. Raises ``ConfigError``."""
    if config.envoy_program is not None:
        if not os.access(config.envoy_program, os.X_OK):
            raise ConfigError(
                f"--envoy-program {config.envoy_program} is no program; name Envoy's, or drop it."
            )
        return config.envoy_program
    require("sglang-tiered route serve", "envoy")
    spec = importlib.util.find_spec("envoy")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "_bin" / "envoy")


def _require_certificate(config: RouteConfig) -> None:
    if config.certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.certificate, config.certificate_key, password="")
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {config.certificate} and --ssl-keyfile {config.certificate_key} "
            f"cannot be used ({error}); name a certificate and its key."
        ) from error


def _require_free(host: str, port: int) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"--port {port} of {host} cannot be listened at ({error.strerror}); stop what listens "
            "there, or pass another --port or --host."
        ) from error


class _Front:
    def __init__(
        self,
        config: RouteConfig,
        program: str,
        path: Path,
        members: Path,
        arguments: Sequence[str],
    ) -> None:
        self._config, self._members = config, members
        self._envoy_command = [program, "-c", str(path), "-l", "warning", "--use-dynamic-base-id"]
        self._envoy_command += ["--log-format", "envoy: %v", "--concurrency", _concurrency()]
        self._envoy_command += ["--drain-strategy", "immediate", "--drain-time-s", str(GRACE_S)]
        self._picker_command = [sys.executable, "-m", "sglang_tiered.route.cli", *arguments]
        self._picker_command += ["--envoy", "off", "--members", str(members), "--with-parent"]
        self._admin = path.parent / "admin"
        self._picker: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    async def run(self) -> int:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        self._picker = await self._start_picker()
        keeping = envoy = None
        stopped = asyncio.create_task(stop.wait())
        try:
            if not await self._was_written(stop):
                code = self._picker.returncode
                if code is None and not stop.is_set():
                    logger.error("the picker does not listen after %g s", START_S)
                    return 1
                return code or 0
            keeping = asyncio.create_task(self._keep_picker())
            envoy = await asyncio.create_subprocess_exec(*self._envoy_command)
            ended = asyncio.create_task(envoy.wait())
            saying = asyncio.create_task(self._say_when_ready())
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            saying.cancel()
            if ended.done():
                logger.error("Envoy ended with %s", envoy.returncode)
                return 1
            self._is_stopping = True
            await self._drain()
            return 0
        finally:
            self._is_stopping = True
            if keeping is not None:
                keeping.cancel()
            for process in (envoy, self._picker):
                await _end(process)

    async def _start_picker(self) -> asyncio.subprocess.Process:
        """In a session of its own: Ctrl-C would meet one that is not yet ready for signals. It ends
        when this process tells it to, or is gone."""
        return await asyncio.create_subprocess_exec(*self._picker_command, start_new_session=True)

    async def _was_written(self, stop: asyncio.Event) -> bool:
        """Wait until the picker listens and has written the servers. False if it ended instead."""
        assert self._picker is not None
        deadline = time.monotonic() + START_S
        last = self._members / f"{CLUSTERS[-1]}.json"
        while not last.exists() and not stop.is_set():
            if self._picker.returncode is not None or time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return not stop.is_set()

    async def _keep_picker(self) -> None:
        while True:
            assert self._picker is not None
            code = await self._picker.wait()
            if self._is_stopping:
                return
            logger.warning("the picker ended with %s; it is started again", code)
            await asyncio.sleep(AGAIN_S)
            try:
                self._picker = await self._start_picker()
            except OSError as error:  # of a machine that is short of memory or processes
                logger.warning("the picker cannot be started now: %s", error)

    async def _say_when_ready(self) -> None:
        config = self._config
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, config.port)
                writer.close()
                hosts = host, config.picker_host
                shown, picker = (f"[{one}]" if ":" in one else one for one in hosts)
                scheme = "http" if config.certificate is None else "https"
                print(
                    f"The front listens at {scheme}://{shown}:{config.port}, its picker at "
                    f"http://{picker}:{config.http_port}/servers.",
                    flush=True,
                )
                return
            await asyncio.sleep(LOOK_S)

    async def _drain(self) -> None:
        """Close each connection with its next answer, after a while take no more, and let what
        runs end."""
        deadline = time.monotonic() + self._config.drain_s
        connector = aiohttp.UnixConnector(str(self._admin))
        timeout = aiohttp.ClientTimeout(total=STOP_S)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                async with session.post("http://envoy/drain_listeners?graceful"):
                    grace = time.monotonic() + GRACE_S
                name = "http.front.downstream_rq_active"
                while time.monotonic() < deadline:
                    async with session.get(f"http://envoy/stats?filter=^{name}$") as answer:
                        is_idle = (await answer.text()).strip() in (f"{name}: 0", "")
                    if is_idle and time.monotonic() > grace:
                        return
                    await asyncio.sleep(LOOK_S)


async def _end(process: asyncio.subprocess.Process | None) -> None:
    if process is None or process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _concurrency() -> str:
    """Threads of Envoy: a core for the picker stays free."""
    return str(max(1, len(os.sched_getaffinity(0)) - 1))
