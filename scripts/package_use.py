"""Uses the installed package, and nothing else, as `package_check.py` asks: commands, compiled modules, a gateway.

Run from a folder that holds no checkout, by the interpreter of the environment.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PROGRAMS = Path(sys.executable).parent
LIMIT_S = 60.0


def said(*command: str | Path) -> str:
    """What a command prints."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return bytes(answer.read())


def when_ready(url: str) -> None:
    give_up = time.monotonic() + LIMIT_S
    while True:
        try:
            fetch(url)
            return
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


def check_commands() -> None:
    version = said(PROGRAMS / "omni-proxy", "--version")
    assert version == said(sys.executable, "-m", "omni_proxy", "--version"), version
    for shell in ("bash", "zsh", "fish"):
        assert "omni-proxy" in said(PROGRAMS / "omni-proxy", "completion", shell)
    simulate = ("simulate", "--synthetic", "poisson,requests=20", "--prefill", "1", "--decode", "1")
    assert "prefill-0" in said(PROGRAMS / "omni-proxy", *simulate)


def check_files() -> None:
    import omni_proxy
    import omni_proxy.core
    import omni_proxy.relay.pump

    here = Path(omni_proxy.__file__).parent
    assert (here / "workers" / "demo_model" / "model.safetensors").is_file()
    assert (here / "py.typed").is_file()
    kernels = importlib.util.find_spec("omni_kernels")  # not imported: it needs the extra [worker]
    assert kernels is not None
    assert list((Path(kernels.origin or "").parent / "cpu" / "src").glob("*.cpp"))
    assert (omni_proxy.core.__file__ or "").endswith(".so"), "the hot path was not compiled"
    assert importlib.util.find_spec("omni_proxy._body_scan") is not None, "the body scanner was not built"
    assert omni_proxy.relay.pump.BUILT or sys.platform != "linux", "the pump was not built"


def check_gateway() -> None:
    ports = {"prefill": free_port(), "decode": free_port()}
    port = free_port()
    entries = [
        {"name": role, "url": f"http://127.0.0.1:{at}", "role": role, "connector": "omni"} for role, at in ports.items()
    ]
    Path("config.yaml").write_text(json.dumps({"listen": {"port": port}, "workers": entries}), encoding="utf-8")
    pretending = ["worker", "--simulate", "demo", "--speed", "100"]
    commands = [[*pretending, "--role", role, "--port", str(at)] for role, at in ports.items()]
    running = [
        subprocess.Popen([PROGRAMS / "omni-proxy", *command]) for command in (*commands, ["serve", "-c", "config.yaml"])
    ]
    try:
        url = f"http://127.0.0.1:{port}"
        when_ready(f"{url}/ready")
        model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
        question = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "one two three"}]}
        answer = json.loads(fetch(f"{url}/v1/chat/completions", question))
        assert answer["usage"]["completion_tokens"] == 4, answer
        assert b"<html" in fetch(f"{url}/omni/ui")
        assert b'omni_handoffs_total{result="done"} 1.0' in fetch(f"{url}/metrics")
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=30)


if __name__ == "__main__":
    check_commands()
    check_files()
    check_gateway()
