"""``Browser``: a headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

from kit.commands import ran

SCRIPT = Path(__file__).parents[2] / "scripts" / "chromium-headless-shell"
DEADLINE_S = 60.0


def chromium() -> tuple[str | None, str]:
    found = ran(SCRIPT, timeout_s=400)
    return (found.stdout.strip() or None), found.stderr.strip()


class Browser:
    """One page of one browser. Not thread-safe."""

    def __init__(self, program: str, profile: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._ids = itertools.count(1)
        self.requests: list[str] = []  # URLs
        self.errors: list[str] = []
        self._process = subprocess.Popen(
            [
                *(program, "--headless", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--no-proxy-server", "--remote-debugging-port=0"),
                *(f"--user-data-dir={profile}", "about:blank"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"listening on ws://([^/]+)/", line):
                break
        else:
            raise AssertionError("Chromium ended before it listened")
        self._loop.run_until_complete(self._connect(found[1]))
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{domain}.enable")

    async def _connect(self, address: str) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://{address}/json") as answer:
            (page,) = [each for each in await answer.json() if each["type"] == "page"]
        url = page["webSocketDebuggerUrl"]
        self._socket = await self._session.ws_connect(url, max_msg_size=0)

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        told = asyncio.wait_for(self._tell(method, parameters), DEADLINE_S)
        return self._loop.run_until_complete(told)

    async def _tell(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == number:
                return dict(message["result"])
            match message:
                case {"method": "Network.requestWillBeSent", "params": {"request": request}}:
                    self.requests.append(request["url"])
                case {"method": "Runtime.exceptionThrown", "params": thrown}:
                    self.errors.append(str(thrown))
                case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as entry}}:
                    self.errors.append(entry["text"])

    def go(self, url: str) -> None:
        self.tell("Page.navigate", url=url)

    def look(self, *, width: int, is_dark: bool) -> None:
        sizes = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **sizes)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, script: str) -> Any:
        how = {"returnByValue": True, "awaitPromise": True}
        found = self.tell("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := self.ask(script)):
            assert time.monotonic() < deadline, (script, self.ask("document.body.innerText"))
            time.sleep(0.05)
        return value

    def picture(self) -> bytes:
        shot = self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
