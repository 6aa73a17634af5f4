"""Whatever an answer is made of and wherever its workers die, the client reads what one worker would have told."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api.resumable import why_not
from omni_proxy.api.resumption import Resumption
from omni_proxy.call import CHAT, parse_call
from omni_proxy.workers.connectors.token_reports import OMNI, VLLM, TokenReports

PIECES = st.lists(st.sampled_from(["", "a", "b", "ab", "ba", "abc", " ", "c", "aa", "é"]), min_size=1, max_size=40)
"""Token n has the text of piece n; an empty one is the beginning of a character that the next one completes."""
STOPS = st.sampled_from([[], ["abc"], ["aab", "bb"], ["abab"], ["c"]])


def engine(pieces: list[str], begin: int, stops: list[str], held: int) -> Iterator[tuple[int, str, bool]]:
    """Tokens from `begin` on: the id, the text that goes out with it, and whether it is the last."""
    out, sent = "", 0
    for at in range(begin, len(pieces)):
        out += pieces[at]
        found = min((out.find(stop) for stop in stops if stop in out), default=-1)
        ended = found >= 0 or at == len(pieces) - 1
        upto = found if found >= 0 else len(out) if ended else max(sent, len(out) - held)
        # An unfinished character is no text yet, so nothing that was held back comes out with it.
        upto = sent if not pieces[at] and not ended else upto
        yield at, out[sent:upto], ended
        sent = max(sent, upto)
        if ended:
            return


def undisturbed(pieces: list[str], stops: list[str]) -> str:
    return "".join(text for _, text, _ in engine(pieces, 0, stops, VLLM.held(stops, included=False)))


@given(pieces=PIECES, stops=STOPS, deaths=st.lists(st.integers(0, 12), max_size=4))
def test_nothing_is_lost_doubled_or_changed(pieces: list[str], stops: list[str], deaths: list[int]) -> None:
    call = parse_call(CHAT, msgspec.json.encode({"model": "m", "messages": [], "stop": stops} | _ASK))
    resumption = Resumption(call, VLLM)
    resumption.prompt = [7]
    held = VLLM.held(stops, included=False)
    read, begin = "", 0
    for death in [*deaths, 10**6]:
        ended = False
        for count, (token, text, ended) in enumerate(engine(pieces, begin, stops, held)):
            if count == death:
                break
            more = resumption.add([token], text)
            assert more is not None, "it is the same text"
            read += more
            if ended:
                break
        if ended and count != death:
            break
        again = resumption.rewind()
        assert again is not None
        assert resumption.rewind() == again
        assert again <= begin + count
        begin = again
        assert resumption.continuation().fields["prompt"] == msgspec.Raw(msgspec.json.encode([7, *range(begin)]))
    assert read == undisturbed(pieces, stops)


_ASK = {"stream": True, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(("reports", "included", "held"), [(VLLM, False, 4), (VLLM, True, 0), (OMNI, False, 0)])
def test_how_much_engines_hold_back(reports: TokenReports, included: bool, held: int) -> None:
    assert reports.held(["abc", "abcde"], included) == held
    assert reports.held([], included) == 0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"stream": False}, "stream"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": False, "frequency_penalty": 0, "response_format": {"type": "text"}, "tools": []}, None),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{}], "tool_choice": "none"}, None),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, None),
    ],
)
def test_who_can_be_continued(fields: dict[str, object], why: str | None) -> None:
    assert why_not(parse_call(CHAT, msgspec.json.encode({"model": "m"} | _ASK | fields))) == why
