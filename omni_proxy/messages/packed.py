"""Usual messages as flat rows of plain values, for the socket between processes. Pure, and compiled.

A row is the number of its kind, then the fields in order, those of what it carries in their place. msgpack writes and
reads such rows without knowing a type; tagged structs (`wire`) say what they are and cost three times as much. So
rows are for processes of one version, structs for event logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from omni_proxy.errors import ErrorCode
from omni_proxy.messages.records import Placement, RequestRecord, Resume
from omni_proxy.messages.usual import (
    Arrived,
    Close,
    DecodeDone,
    FirstToken,
    Lease,
    LegSent,
    PrefillDone,
    RequestSpec,
    StartDecode,
    StartPrefill,
    Usage,
)
from omni_proxy.messages.words import Leg, Mark, Mode, Outcome, Stage

Row = list[Any]

_ARRIVED: Final = 1
_LEG_SENT: Final = 2
_PREFILL_DONE: Final = 3
_FIRST_TOKEN: Final = 4
_DECODE_DONE: Final = 5
_START_PREFILL: Final = 6
_START_DECODE: Final = 7
_CLOSE: Final = 8

_LEGS: Final[list[Leg]] = list(Leg)
_LEG_NUMBERS: Final[dict[Leg, int]] = {leg: number for number, leg in enumerate(_LEGS)}
_STAGES: Final[list[Stage]] = list(Stage)
_STAGE_NUMBERS: Final[dict[Stage, int]] = {stage: stage.value for stage in Stage}
_OUTCOMES: Final[list[Outcome]] = list(Outcome)
_OUTCOME_NUMBERS: Final[dict[Outcome, int]] = {outcome: number for number, outcome in enumerate(_OUTCOMES)}
_MODES: Final[list[Mode]] = list(Mode)
_MODE_NUMBERS: Final[dict[Mode, int]] = {mode: number for number, mode in enumerate(_MODES)}


def pack(message: object) -> Row | None:
    """The row of a message; None: it is none of the usual ones."""
    if type(message) is LegSent:
        return _begin(_LEG_SENT, message.lease)
    if type(message) is FirstToken:
        return _begin(_FIRST_TOKEN, message.lease)
    if type(message) is PrefillDone:
        row = _begin(_PREFILL_DONE, message.lease)
        row.append(message.handoff)
        row.append(message.ended)
        _add_usage(row, message.usage)
        return row
    if type(message) is DecodeDone:
        row = _begin(_DECODE_DONE, message.lease)
        _add_usage(row, message.usage)
        return row
    if type(message) is StartPrefill:
        row = _begin(_START_PREFILL, message.lease)
        row.append(message.peer)
        return row
    if type(message) is StartDecode:
        row = _begin(_START_DECODE, message.lease)
        row.append(message.peer)
        row.append(message.pull_until)
        return row
    if type(message) is Arrived:
        return _arrived(message.rid, message.spec)
    if type(message) is Close:
        return _close(message)
    return None


def unpack(row: Row) -> object:
    """The message of a row. Raises TypeError, ValueError, IndexError or KeyError for what is none."""
    kind: int = row[0]
    if kind == _LEG_SENT:
        return LegSent(_lease_in(row, 1))
    if kind == _PREFILL_DONE:
        return PrefillDone(_lease_in(row, 1), row[5], row[6], Usage(row[7], row[8], row[9]))
    if kind == _FIRST_TOKEN:
        return FirstToken(_lease_in(row, 1))
    if kind == _DECODE_DONE:
        return DecodeDone(_lease_in(row, 1), Usage(row[5], row[6], row[7]))
    if kind == _START_PREFILL:
        return StartPrefill(_lease_in(row, 1), row[5])
    if kind == _START_DECODE:
        return StartDecode(_lease_in(row, 1), row[5], row[6])
    if kind == _ARRIVED:
        return Arrived(row[1], _spec_in(row))
    if kind == _CLOSE:
        return _close_in(row)
    raise ValueError(f"no message is of kind {kind}")


def _begin(kind: int, lease: Lease) -> Row:
    return [kind, lease.rid, lease.attempt, lease.worker, _LEG_NUMBERS[lease.leg]]


def _lease_in(row: Row, at: int) -> Lease:
    return Lease(row[at], row[at + 1], row[at + 2], _LEGS[row[at + 3]])


def _add_usage(row: Row, usage: Usage) -> None:
    row.append(usage.prompt_tokens)
    row.append(usage.completion_tokens)
    row.append(usage.cached_tokens)


def _arrived(rid: str, spec: RequestSpec) -> Row:
    return [
        _ARRIVED,
        rid,
        spec.model,
        spec.endpoint,
        spec.prompt_tokens,
        spec.max_tokens,
        spec.stream,
        spec.priority,
        spec.tokenize,
        spec.external_id,
        spec.tenant,
        spec.whole,
        spec.thinking,
        spec.session,
        spec.ttft_target_s,
        spec.encode_s,
    ]


def _spec_in(row: Row) -> RequestSpec:
    """The spec that begins at the third place."""
    return RequestSpec(
        row[2],
        row[3],
        row[4],
        row[5],
        row[6],
        row[7],
        row[8],
        row[9],
        row[10],
        row[11],
        row[12],
        row[13],
        row[14],
        row[15],
    )


def _close(close: Close) -> Row:
    failed = close.failed
    return [
        _CLOSE,
        close.rid,
        _OUTCOME_NUMBERS[close.outcome],
        None if close.error is None else close.error.value,
        close.detail,
        None if failed is None else _begin(_CLOSE, failed),
        close.retry_after_s,
        _record(close.record),
    ]


def _close_in(row: Row) -> Close:
    failed: Row | None = row[5]
    return Close(
        row[1],
        _OUTCOMES[row[2]],
        _record_in(row[7]),
        None if row[3] is None else ErrorCode(row[3]),
        row[4],
        None if failed is None else _lease_in(failed, 1),
        row[6],
    )


def _record(record: RequestRecord) -> Row:
    mode, outcome, error = record.mode, record.outcome, record.error
    return [
        record.rid,
        record.external_id,
        record.model,
        record.endpoint,
        record.stream,
        None if mode is None else _MODE_NUMBERS[mode],
        _marks(record.marks),
        record.prefill_done_at,
        record.first_token_at,
        None if outcome is None else _OUTCOME_NUMBERS[outcome],
        None if error is None else error.value,
        record.detail,
        [_placement(placement) for placement in record.placements],
        record.attempts,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.tenant,
        record.predicted_tokens,
        record.predicted_first_at,
        [(resume.at, resume.worker, resume.tokens) for resume in record.resumes],
        record.ttft_target_s,
        record.encode_s,
    ]


def _record_in(row: Row) -> RequestRecord:
    placements: list[Row] = row[12]
    resumes: list[Row] = row[20]
    return RequestRecord(
        row[0],
        row[1],
        row[2],
        row[3],
        row[4],
        None if row[5] is None else _MODES[row[5]],
        _marks_in(row[6]),
        row[7],
        row[8],
        None if row[9] is None else _OUTCOMES[row[9]],
        None if row[10] is None else ErrorCode(row[10]),
        row[11],
        tuple([_placement_in(placement) for placement in placements]),
        row[13],
        row[14],
        row[15],
        row[16],
        row[17],
        row[18],
        row[19],
        tuple([Resume(resume[0], resume[1], resume[2]) for resume in resumes]),
        row[21],
        row[22],
    )


def _marks(marks: Sequence[Mark]) -> Row:
    """All marks one after another: a list for each would cost more than what is in it."""
    flat: Row = []
    for stage, at, attempt in marks:
        flat.append(_STAGE_NUMBERS[stage])
        flat.append(at)
        flat.append(attempt)
    return flat


def _marks_in(flat: Row) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    for at in range(0, len(flat), 3):
        marks.append((_STAGES[flat[at]], flat[at + 1], flat[at + 2]))
    return tuple(marks)


def _placement(placement: Placement) -> Row:
    return [
        placement.worker,
        _LEG_NUMBERS[placement.leg],
        placement.reason,
        placement.candidates,
        placement.start_s,
        placement.finish_s,
        placement.cached_tokens,
    ]


def _placement_in(row: Row) -> Placement:
    candidates: list[list[Any]] = row[3]
    shown: list[tuple[str, float]] = [(name, seconds) for name, seconds in candidates]
    return Placement(row[0], _LEGS[row[1]], row[2], tuple(shown), row[4], row[5], row[6])
