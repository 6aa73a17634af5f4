"""`omni-proxy top`: its lines, its faults, and the whole program in a pty."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_proxy.cli import main
from omni_proxy.messages import WorkerDraining
from omni_proxy.ui.heat import Heat
from omni_proxy.ui.points import Limits, Point
from omni_proxy.ui.rows import Row
from omni_proxy.ui.top.screen import render
from omni_proxy.ui.top.state import SeenWorker, State
from omni_proxy.ui.top.text import count, length, plain, seconds
from tests.relay.conftest import Rig, Start
from tests.ui.conftest import ADMIN, TOKEN, admin_url

pyte = pytest.importorskip("pyte", reason="pyte, a terminal in memory, is not installed")


def point(**fields: Any) -> Point:
    nothing: dict[str, Any] = dict.fromkeys(Point.__struct_fields__, 0) | {"seconds": 2.0}
    latencies = {name: None for name in Point.__struct_fields__ if "_p" in name and name.endswith("_s")}
    return Point(**(nothing | latencies | fields))


def row(number: int, **fields: Any) -> Row:
    spans = ((0, 0.0, 0.01), (3, 0.01, 0.09), (5, 0.1, 0.2), (6, 0.3, 0.1), (8, 0.4, 0.6))
    usual: dict[str, Any] = {
        "rid": f"rid-{number}",
        "id": f"chat-{number}",
        "model": "m",
        "mode": "sequential",
        "arrived": 1000.0 + number,
        "stage": "FINISHED",
        "outcome": "completed",
        "error": None,
        "ttft_s": 0.42,
        "e2e_s": 1.0,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "generated_tokens": 20,
        "prefill": "p0",
        "decode": "d0",
        "attempts": 2,
        "resumes": 0,
        "spans": spans,
    }
    return Row(**(usual | fields))


def state(**fields: Any) -> State:
    usual: dict[str, Any] = {
        "version": "1.2.3",
        "now": 1010.0,
        "ready": True,
        "limits": Limits(),
        "waiting": 3,
        "waiting_tokens": 12_345,
        "live_count": 1,
        "window": point(
            seconds=10.0, ended=40, good=38, completed=40, ttft_p50_s=0.25, prompt_tokens=100, cached_tokens=75
        ),
        "workers": [
            SeenWorker("p0", "prefill", "up", 2, 8, 512, 30_000, 0.12, 60_000, 1_000),
            SeenWorker("d0", "decode", "draining", 4, 4, 0, 4_000, 0.0, 5_000, 0, "drained by the operator"),
        ],
        "live": [],
        "ended": [row(1)],
        "points": [point(good=n, ttft_p50_s=n / 10) for n in range(5)],
        "experts": [Heat("d0", [0, 3], 8, "", [1.5, 2.0], None, 3, 1000, 5.0)],
    }
    return State(**(usual | fields))


@pytest.mark.parametrize("width", [1, 60, 80, 120, 200])
def test_every_line_has_room(width: int) -> None:
    crowded = state(
        workers=[SeenWorker("p" * 90, "prefill", "up", 10**6, 10**6, 10**9, 10**9, 1e5, 10**9, 10**8)],
        ended=[row(n, id="x" * 160, prefill="p" * 90, decode="d" * 90, outcome="timed_out") for n in range(3)],
    )
    for shown in (state(), crowded, state(workers=[], ended=[], points=[], experts=None)):
        assert max(map(length, render(shown, width))) <= max(width, 60)


def test_it_says_what_runs_where() -> None:
    text = plain(render(state(), 120))
    assert "waiting 3 (12.3k tok)" in text
    assert "goodput 3.8/s of 4.0/s" in text
    assert "cached 75%" in text
    assert "30.0k/60.0k !1000" in text
    assert "drained by the operator" in text
    assert "2 layers x 8, max/mean 1.75, 2.00 in layer 3, 3 idle" in text
    bars = next(line for line in text.splitlines() if "chat-1" in line)
    assert "p0 → d0" in bars
    drawn = "".join(c for c in bars.split("d0", 1)[1] if c in "PD.X")
    width = len(drawn)
    assert abs(drawn.count("P") / width - 0.2) < 0.06
    assert abs(drawn.count("D") / width - 0.6) < 0.06
    assert drawn == "".join(sorted(drawn, key=drawn.index)) or drawn.index("P") < drawn.index("D")


def test_both_tracks_of_a_parallel_request_show() -> None:
    both = row(1, mode="parallel", spans=((5, 0.0, 0.5), (8, 0.25, 0.75)))
    text = plain(render(state(ended=[both]), 120))
    bars = next(line for line in text.splitlines() if "chat-1" in line).split("d0", 1)[1]
    assert bars.index("P") < bars.index("X") < bars.index("D")


def test_nothing_from_outside_reaches_the_terminal_as_a_command() -> None:
    evil = "\x1b[2Jx\r\n\x07\u202e\x9b31m"
    shown = state(
        version=evil,
        workers=[SeenWorker(evil, "prefill", evil, 1, 2, 3, 4, 0.0, None, 0, evil)],
        ended=[row(1, id=evil, prefill=evil, decode=evil, outcome=evil)],
        experts=[Heat(evil, [0], 2, "", [1.0], None, 0, 1, None)],
    )
    for line in render(shown, 120):
        assert all(text.isprintable() for text, _ in line), line


def test_numbers_are_short() -> None:
    assert [seconds(s) for s in (None, 0.0012, 0.25, 1.234, 12.34, 123.4)] == [
        "-", "1.2 ms", "250 ms", "1.23 s", "12.3 s", "123 s",
    ]  # fmt: skip
    assert [count(n) for n in (0, 9999, 12_345, 123_456, 12_345_678)] == ["0", "9999", "12.3k", "123k", "12.3M"]


def test_what_the_gateway_sends_is_what_is_read() -> None:
    assert msgspec.json.decode(msgspec.json.encode(state()), type=State) == state()


# ---------------------------------------------------------------------------------------------- the program


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["top", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("omni-proxy top: ")
    assert error.count("\n") == 1
    return error


def test_faults_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be reached (ConnectError)" in failing(capsys, "http://127.0.0.1:9", "--once")
    assert "is no URL" in failing(capsys, "nonsense", "--once")
    assert "is no URL" in failing(capsys, "http://[::1", "--once")
    assert "cannot read" in failing(capsys, "--token-file", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    assert "holds no token" in failing(capsys, "--token-file", str(tmp_path / "empty"))
    assert "not both" in failing(capsys, "http://127.0.0.1:9", "-c", "x.yaml")


async def once(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omni_proxy", "top", "--once", "--width", "110", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_once_prints_a_snapshot_and_wants_the_token(start: Start, tmp_path: Path) -> None:
    rig = await start(ADMIN)
    await rig.chat(stream=True)
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    code, out, err = await once(admin_url(rig), "--token-file", str(token))
    assert (code, err) == (0, "")
    assert "Omni Proxy" in out
    assert "p0 → d0" in out
    assert "\x1b" not in out
    code, out, err = await once(admin_url(rig))
    assert (code, out) == (2, "")
    assert "--token-file" in err
    # On the clients' port there is no page beside an admin port, and the fault says where it is.
    code, _, err = await once(f"http://127.0.0.1:{rig.port}")
    assert code == 2
    assert "admin port" in err


async def test_address_and_token_come_from_the_config(start: Start, tmp_path: Path) -> None:
    rig = await start(ADMIN)
    port = admin_url(rig).rpartition(":")[2]
    config = tmp_path / "gateway.yaml"
    config.write_text(f"admin: {{host: 0.0.0.0, port: {port}, token: {TOKEN}}}\n")
    code, out, err = await once("-c", str(config))
    assert (code, err) == (0, "")
    assert "Prefill" in out


class Terminal:
    """A program in a pty, and the screen that it has drawn."""

    def __init__(self, master: int, process: asyncio.subprocess.Process) -> None:
        self.screen = pyte.Screen(110, 30)
        self._stream = pyte.ByteStream(self.screen)
        self._master = master
        self.process = process

    def read(self) -> None:
        try:
            self._stream.feed(os.read(self._master, 65536))
        except OSError:  # the program has ended
            asyncio.get_running_loop().remove_reader(self._master)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    async def until(self, text: str, there: bool = True) -> None:
        try:
            async with asyncio.timeout(20):
                while (text in self.text) is not there:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{text!r} is {'not ' if there else ''}on the screen:\n{self.text}") from None


@asynccontextmanager
async def terminal(rig: Rig, *arguments: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    environment.pop("LINES", None)
    environment.pop("COLUMNS", None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omni_proxy", "top", f"http://127.0.0.1:{rig.port}", "--interval", "0.1", *arguments,
        stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    found = Terminal(master, process)
    asyncio.get_running_loop().add_reader(master, found.read)
    try:
        yield found
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


@pytest.mark.slow
async def test_in_a_terminal_it_follows_the_gateway_until_q(start: Start) -> None:
    rig = await start()
    async with terminal(rig) as shown:
        await shown.until("No request has come yet.")
        await shown.until("q quit")
        await rig.client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "x"}]},
            headers={"x-request-id": "seen-1"},
        )
        await shown.until("seen-1")
        await shown.until("p0 → d0")
        shown.press(b"p")
        await shown.until("paused")
        shown.press(b"p")
        await shown.until("paused", there=False)
        rig.gateway.scheduling.post(WorkerDraining("p0"))
        await shown.until("draining")
        shown.press(b"q")
        async with asyncio.timeout(10):
            assert await shown.process.wait() == 0


@pytest.mark.slow
async def test_it_scrolls_and_says_when_the_gateway_is_gone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await start()
    for number in range(30):
        await rig.client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "x"}]},
            headers={"x-request-id": f"n{number:02}"},
        )
    async with terminal(rig) as shown:
        await shown.until("n29")
        assert "n00" not in shown.text
        shown.press(b"\x1bOF")  # End
        await shown.until("n00")
        shown.press(b"\x1bOH")
        await shown.until("Omni Proxy")

        monkeypatch.setattr(rig.gateway.scheduling.page, "state", lambda: b"{}")
        await shown.until("is not what it should be")
        assert "n29" in shown.text
        shown.press(b"\x1b")
        async with asyncio.timeout(10):
            assert await shown.process.wait() == 0


async def test_without_a_terminal_it_says_so(start: Start) -> None:
    rig = await start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omni_proxy", "top", f"http://127.0.0.1:{rig.port}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"--once" in err
