"""In words: why a request took as long as it did, and what would have made it faster. Pure.

Every part of its time has one cause (`explain_parts`), and the parts add up to the whole. docs/explain.md has a list of
the causes with their remedies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_proxy.messages import Outcome, RequestRecord
from omni_proxy.observe.explain_parts import Cause, Part, parts_of

JsonObject = dict[str, object]

SHOWN_SHARE: Final = 0.02
"""A part below this share of the whole is told in the list, not in words."""

REMEDIES: Final[Mapping[Cause, str]] = {
    Cause.GATEWAY: "The gateway itself was busy: give it more processes (`processes`) or a core of its own.",
    Cause.TOKENISING: "Give the gateway more processes (`processes`); prompts that begin alike are tokenised faster.",
    Cause.QUEUE: "More prefill workers, or fewer requests at a time; a higher `priority` or a `ttft_target_s` "
    "puts this one before others.",
    Cause.PREFIX: "Another worker with the same prefix: more traffic with it spreads it by itself.",
    Cause.BEHIND: "More prefill workers; prompts are sent ahead of their turn so that workers never idle.",
    Cause.COMPUTING: "A shorter prompt, or one that begins like an earlier one, so that more of it is cached; faster "
    "or larger prefill workers.",
    Cause.SLOW_WORKER: "Look at this worker: other load on its machine, throttling, or work of other clients.",
    Cause.MISSED_HANDOFF: "The prefill worker gave no KV parameters: see its log and `omni_handoffs_total`; another "
    "worker had to compute the prompt again.",
    Cause.RETRY: "An attempt failed: see the worker's log and `detail`; health checks that find it sooner spare this.",
    Cause.RESUME: "A decode worker was lost in mid-answer; without `resume` the stream would have ended there.",
    Cause.DECODE_ROOM: "More decode workers, or more sequences and KV memory on them (`max_seqs`, `tpot_limit_s`).",
    Cause.HANDOFF: "A faster link between the workers, or `parallel` mode, in which KV is pushed while it is computed.",
    Cause.ANSWER: "A shorter answer (`max_tokens`), or decode workers with fewer sequences at a time (`tpot_limit_s`).",
}


def explain(record: RequestRecord, now: float) -> JsonObject:
    """The parts of a request's time with their causes, and sentences about them. `now`: for one that has not ended."""
    parts = parts_of(record, now)
    whole = sum(part.seconds for part in parts)
    begin = record.arrived_at
    first = None if record.first_token_at is None else record.first_token_at - begin
    by_cause: dict[Cause, float] = {}
    for part in parts:
        by_cause[part.cause] = by_cause.get(part.cause, 0.0) + part.seconds
    ranked = sorted(by_cause, key=lambda cause: -by_cause[cause])
    told = [cause for cause in ranked if by_cause[cause] >= SHOWN_SHARE * whole and by_cause[cause] > 0]
    return {
        "id": record.external_id,
        "outcome": record.outcome,
        "seconds": round(whole, 6),
        "ttft_s": None if first is None else round(first, 6),
        "summary": _summary(record, whole, first),
        "parts": [
            {
                "cause": part.cause,
                "start_s": round(part.start - begin, 6),
                "seconds": round(part.seconds, 6),
                "worker": None if part.placement is None else part.placement.worker,
                "text": _sentence(record, part),
            }
            for part in parts
        ],
        "causes": {cause: round(by_cause[cause], 6) for cause in ranked},
        "faster": [{"cause": cause, "seconds": round(by_cause[cause], 6), "text": REMEDIES[cause]} for cause in told],
    }


def as_text(told: JsonObject) -> str:
    """An explanation as lines for a terminal."""
    parts, faster = told["parts"], told["faster"]
    assert isinstance(parts, list)
    assert isinstance(faster, list)
    lines = [str(told["summary"]), ""]
    lines += [f"{part['seconds'] * 1000:10.1f} ms  {part['text']}" for part in parts]
    lines += [f"{float(str(told['seconds'])) * 1000:10.1f} ms  in all", "", "What would have made it faster:"]
    lines += [f"  - {one['text']} ({one['seconds'] * 1000:.1f} ms)" for one in faster]
    return "\n".join(lines)


def _summary(record: RequestRecord, whole: float, first: float | None) -> str:
    ended = record.outcome
    how = {
        None: f"It has run for {_time(whole)}",
        Outcome.COMPLETED: f"It took {_time(whole)}",
        Outcome.REJECTED: f"It was refused after {_time(whole)}",
        Outcome.CANCELLED: f"Its client left after {_time(whole)}",
        Outcome.FAILED: f"It failed after {_time(whole)}",
        Outcome.TIMED_OUT: f"It was given up after {_time(whole)}",
    }[ended]
    text = how + ("" if first is None else f", {_time(first)} of them until its first token") + "."
    target = record.ttft_target_s
    if target is not None and first is not None:
        late = first - target
        text += f" Its target for that was {_time(target)}: "
        text += f"missed by {_time(late)}." if late > 0 else "met."
    if record.error is not None and record.detail:
        text += f" {record.detail}"
    return text


def _sentence(record: RequestRecord, part: Part) -> str:
    place = part.placement
    where = "a worker" if place is None else place.worker
    match part.cause:
        case Cause.GATEWAY:
            return "in the gateway itself"
        case Cause.TOKENISING:
            return f"turning the prompt into {_count(record.prompt_tokens, 'token')}"
        case Cause.QUEUE:
            return "waiting for a worker: none had room" + ("" if place is None else f"; then {where} took it")
        case Cause.PREFIX:
            return _of_prefix(record, part)
        case Cause.BEHIND:
            return f"on {where}, behind prompts that were sent before"
        case Cause.COMPUTING:
            return f"computing the prompt on {where}: {_of_prompt(record)}"
        case Cause.SLOW_WORKER:
            return f"longer than {where} was expected to take"
        case Cause.MISSED_HANDOFF:
            return "computing the prompt in vain: its worker gave nothing that another could pull"
        case Cause.RETRY:
            return f"an attempt that came to nothing, on {where}"
        case Cause.RESUME:
            return "taking up the answer on other workers, after the one that made it was lost"
        case Cause.DECODE_ROOM:
            return f"waiting for room on a decode worker; then {where} took it"
        case Cause.HANDOFF:
            return f"moving the KV to {where}, and its first step"
        case Cause.ANSWER:
            return _of_answer(record, part, where)


def _of_prefix(record: RequestRecord, part: Part) -> str:
    place = part.placement
    assert place is not None
    text = f"waiting for {place.worker}, which holds {_count(place.cached_tokens or 0, 'token')} of its prompt"
    if len(place.candidates) > 1:
        (_, best), (other, second) = place.candidates[:2]
        text += f"; {other} was rated {_time(max(0.0, second - best))} worse"
    return text


def _of_prompt(record: RequestRecord) -> str:
    cached = record.cached_tokens
    if cached is None:
        return _count(record.prompt_tokens, "token")
    uncached = max(0, record.prompt_tokens - cached)
    return f"{_count(uncached, 'token')} of {record.prompt_tokens:,}, the others were cached"


def _of_answer(record: RequestRecord, part: Part, where: str) -> str:
    made = record.completion_tokens
    if made is None or made < 2:
        return f"the rest of the answer, on {where}"
    return f"the rest of the answer on {where}: {_count(made - 1, 'token')}, {_time(part.seconds / (made - 1))} each"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
