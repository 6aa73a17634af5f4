"""One line of the access log, in JSON or in the combined format. Pure, and compiled: every request pays for one."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from msgspec import UNSET

from omni_proxy.lifecycle.enums import FINISHED
from omni_proxy.lifecycle.timeline import visit_ends
from omni_proxy.messages import Leg, RequestRecord, Stage
from omni_proxy.observe.log_shape import Line, Refused

_LEG_NAMES: Final = {leg: f"{leg.value}:" for leg in Leg}
_UNSET: Final = UNSET
_TIMES: Final = int(Stage.FINISHED) + 1
_encode_into: Final = msgspec.json.Encoder().encode_into
_AT_END: Final = -1


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


def add_json(lines: bytearray, ending: Ending, record: RequestRecord | None, now: float, wall: float) -> None:
    """Add the JSON line, without its end; docs/access-log.md lists its fields.

    `record` is None where the core never heard of the request (without an error: it was answered here), and has no
    marks where its scheduler died.
    """
    at, request = _rounded(wall, 1e3), f"{ending.method} {ending.path}"
    line: Line | Refused
    if record is None:
        outcome = "completed" if ending.error is None else "rejected"
        line = Refused(
            at, ending.request_id, ending.client, request, ending.status, ending.bytes_out, ending.error, outcome
        )
    else:
        line = _of_record(at, request, ending, record, now)
    _encode_into(line, lines, _AT_END)


def _of_record(at: float, request: str, ending: Ending, record: RequestRecord, now: float) -> Line:
    first, encode_s, times = record.first_token_at, record.encode_s, _times(record, now)
    ttft = None if first is None or not record.marks else _rounded(first - record.marks[0][1], 1e6)
    return Line(
        at,
        ending.request_id,
        ending.client,
        request,
        ending.status,
        ending.bytes_out,
        ending.error,
        record.outcome,
        record.model,
        record.mode,
        record.stream,
        [_LEG_NAMES[p.leg] + p.worker for p in record.placements],
        record.prompt_tokens,
        record.cached_tokens,
        record.predicted_tokens,
        record.completion_tokens,
        len(record.resumes),
        ttft,
        _UNSET if encode_s is None else _rounded(encode_s, 1e6),
        times[0],
        times[1],
        times[2],
        times[3],
        times[4],
        times[5],
        times[6],
        times[7],
        times[8],
        times[9],
    )


def _times(record: RequestRecord, now: float) -> list[Any]:
    """The whole time, then that in each stage, all visits summed; unset is what there was not."""
    times: list[Any] = [_UNSET] * _TIMES
    marks = record.marks
    if not marks:
        return times
    for index, end in enumerate(visit_ends(record, now)):
        stage, begin, _ = marks[index]
        place: int = stage
        before = times[place + 1]
        spent = _rounded(end - begin, 1e6)
        times[place + 1] = spent if before is _UNSET else before + spent
    last, ended_at, _ = marks[-1]
    times[0] = _rounded((ended_at if last is FINISHED else now) - marks[0][1], 1e6)
    return times


def combined_line(ending: Ending, wall: float) -> bytes:
    """The format of nginx and Apache."""
    stamp = time.strftime("%d/%b/%Y:%H:%M:%S %z", time.localtime(wall))
    agent = ending.user_agent.decode("latin-1").replace('"', "'") or "-"
    line = (
        f'{ending.client or "-"} - - [{stamp}] "{ending.method} {ending.path} HTTP/1.1" '
        f'{ending.status} {ending.bytes_out} "-" "{agent}"'
    )
    return line.encode("utf-8", "replace")


def _rounded(value: float, scale: float) -> float:
    """Rounded to a fraction of `scale`: the built-in goes through text."""
    return float(int(value * scale + (0.5 if value >= 0.0 else -0.5))) / scale
