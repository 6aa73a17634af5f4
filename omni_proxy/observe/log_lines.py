"""One line of the access log, in JSON or in the combined format. Pure, and compiled: every request pays for one."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import Mode, Outcome, RequestRecord, Stage

_STAGE_KEYS: Final[tuple[str, ...]] = tuple(f',"{stage.name.lower()}_s":' for stage in Stage)
_LEG_KEYS: Final = {leg: f'"{leg}:' for leg in ("prefill", "decode")}


class Ending:
    """What the edge knows of an ended exchange."""

    __slots__ = ("bytes_out", "client", "error", "method", "path", "request_id", "status", "user_agent")

    def __init__(
        self,
        request_id: str,
        client: str,
        method: str,
        path: str,
        status: int,
        bytes_out: int,
        user_agent: bytes,
        error: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.client = client
        self.method = method
        self.path = path
        self.status = status
        self.bytes_out = bytes_out
        self.user_agent = user_agent
        self.error = error


def json_line(ending: Ending, record: RequestRecord | None, now: float, wall: float) -> bytes:
    """The JSON line; docs/access-log.md lists its fields. Absent stages are absent.

    `record` is None where the core never heard of the request, and has no marks where its scheduler died.
    """
    parts = [
        '{"time":',
        _decimal(wall, 3),
        ',"id":',
        quoted(ending.request_id),
        ',"client":',
        quoted(ending.client),
        ',"request":',
        quoted(ending.method + " " + ending.path),
        ',"status":',
        str(ending.status),
        ',"bytes":',
        str(ending.bytes_out),
        ',"error":',
        "null" if ending.error is None else quoted(ending.error),
    ]
    if record is None:
        parts.append(',"outcome":"rejected"}')
    else:
        _tell_record(parts, record, now)
        parts.append("}")
    return "".join(parts).encode()


def _tell_record(parts: list[str], record: RequestRecord, now: float) -> None:
    outcome, mode = record.outcome, record.mode
    parts += [
        ',"outcome":',
        '"completed"' if outcome is Outcome.COMPLETED else "null" if outcome is None else quoted(outcome.value),
        ',"model":',
        quoted(record.model),
        ',"mode":',
        '"sequential"' if mode is Mode.SEQUENTIAL else "null" if mode is None else quoted(mode.value),
        ',"stream":',
        "true" if record.stream else "false",
        ',"workers":[',
        ",".join([_LEG_KEYS[p.leg] + quoted(p.worker)[1:] for p in record.placements]),
        '],"prompt_tokens":',
        str(record.prompt_tokens),
        ',"cached_tokens":',
        _count(record.cached_tokens),
        ',"predicted_tokens":',
        _count(record.predicted_tokens),
        ',"generated_tokens":',
        _count(record.completion_tokens),
        ',"resumes":',
        str(len(record.resumes)),
    ]
    marks = record.marks
    if not marks:
        return
    begin, last, first = marks[0].at, marks[-1], record.first_token_at
    end = last.at if last.stage is Stage.FINISHED else now
    parts += [
        ',"ttft_s":',
        "null" if first is None else _decimal(first - begin, 6),
        ',"e2e_s":',
        _decimal(end - begin, 6),
    ]
    seconds: dict[int, float] = {}
    for stage, start, stop in stage_spans(record, now):
        index = int(stage)
        seconds[index] = seconds.get(index, 0.0) + (stop - start)
    for index, value in seconds.items():
        parts.append(_STAGE_KEYS[index])
        parts.append(_decimal(value, 6))


def combined_line(ending: Ending, wall: float) -> bytes:
    """The format of nginx and Apache."""
    stamp = time.strftime("%d/%b/%Y:%H:%M:%S %z", time.localtime(wall))
    agent = ending.user_agent.decode("latin-1").replace('"', "'") or "-"
    line = (
        f'{ending.client or "-"} - - [{stamp}] "{ending.method} {ending.path} HTTP/1.1" '
        f'{ending.status} {ending.bytes_out} "-" "{agent}"'
    )
    return line.encode("utf-8", "replace")


def quoted(text: str) -> str:
    """A JSON string."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return '"' + text + '"'
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()


def _count(value: int | None) -> str:
    return "null" if value is None else str(value)


def _decimal(value: float, digits: int) -> str:
    """A number with at most so many digits behind its point, through whole numbers: a float's own text costs more."""
    scale = 10**digits if digits != 6 else 1_000_000
    whole = int(value * scale + (0.5 if value >= 0 else -0.5))
    sign = ""
    if whole < 0:
        sign, whole = "-", -whole
    return sign + str(whole // scale) + "." + str(whole % scale).rjust(digits, "0")
