"""The access log's lines: valid JSON whatever clients send, with the numbers of the record."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.errors import ErrorCode
from omni_proxy.messages import Leg, Mark, Mode, Outcome, Placement, RequestRecord, Stage
from omni_proxy.observe.log_lines import Ending, add_json, combined_line

WALL = 1_700_000_000.1239


def ending(request_id: str = "id-1", status: int = 200, error: str | None = None, agent: bytes = b"curl") -> Ending:
    return Ending(request_id, "127.0.0.1", "POST", "/v1/completions", status, 17, agent, error)


def record(marks: tuple[Mark, ...], mode: Mode | None = Mode.SEQUENTIAL, model: str = "m") -> RequestRecord:
    return RequestRecord(
        rid="r",
        external_id="id-1",
        model=model,
        endpoint="/v1/completions",
        stream=True,
        mode=mode,
        marks=marks,
        prefill_done_at=None,
        first_token_at=marks[0][1] + 0.5 if marks else None,
        outcome=Outcome.COMPLETED,
        error=None,
        detail="",
        placements=(Placement("p0", Leg.PREFILL, "x"), Placement("d0", Leg.DECODE, "x")),
        attempts=2,
        prompt_tokens=11,
        cached_tokens=None,
        completion_tokens=7,
    )


def json_line(told: Ending, known: RequestRecord | None, now: float, wall: float) -> bytes:
    lines = bytearray(b"before\n")
    add_json(lines, told, known, now, wall)
    assert lines.startswith(b"before\n")
    return bytes(lines[7:])


MARKS = (
    (Stage.RECEIVED, 10.0, 0),
    (Stage.PREFILL_WAITING, 10.001, 0),
    (Stage.PREFILL_SCHEDULED, 10.002, 1),
    (Stage.PREFILL_WAITING, 10.1, 1),
    (Stage.FINISHED, 12.3456789, 2),
)


def test_a_line_holds_the_numbers_of_its_request() -> None:
    line = json.loads(json_line(ending(), record(MARKS), 99.0, WALL))
    assert line["time"] == 1_700_000_000.124
    assert line["request"] == "POST /v1/completions"
    assert line["workers"] == ["prefill:p0", "decode:d0"]
    assert (line["outcome"], line["mode"], line["stream"], line["error"]) == ("completed", "sequential", True, None)
    assert (line["prompt_tokens"], line["cached_tokens"], line["generated_tokens"]) == (11, None, 7)
    assert line["ttft_s"] == 0.5
    assert line["e2e_s"] == 2.345679
    assert line["prefill_waiting_s"] == pytest.approx(0.001 + 2.245679, abs=2e-6), "both visits"
    assert "decode_running_s" not in line


def test_a_live_request_ends_now() -> None:
    line = json.loads(json_line(ending(), record(MARKS[:3]), 11.0, WALL))
    assert line["e2e_s"] == 1.0
    assert line["prefill_scheduled_s"] == 0.998


def test_a_request_that_the_core_never_heard_of_has_no_record() -> None:
    line = json.loads(json_line(ending(status=400, error=str(ErrorCode.INVALID_JSON)), None, 0.0, WALL))
    assert line["outcome"] == "rejected"
    assert line["error"] == "invalid_json"
    assert "model" not in line


def test_a_request_whose_scheduler_died_has_no_stages() -> None:
    line = json.loads(json_line(ending(), record((), mode=None), 0.0, WALL))
    assert line["mode"] is None
    assert "e2e_s" not in line


@given(st.floats(0, 1e6), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
def test_any_duration_and_name_is_valid(seconds: float, model: str) -> None:
    marks = ((Stage.RECEIVED, 0.0, 0), (Stage.FINISHED, seconds, 0))
    line = json.loads(json_line(ending(), record(marks, model=model), 0.0, WALL))
    assert math.isclose(line["e2e_s"], seconds, abs_tol=1e-6)
    assert line["model"] == model


def test_the_combined_format_takes_any_user_agent() -> None:
    line = combined_line(ending(agent=b'a"b\xff'), WALL).decode()
    assert line.startswith("127.0.0.1 - - [")
    assert line.endswith('"POST /v1/completions HTTP/1.1" 200 17 "-" "a\'b\xff"')
