"""Which fields of a client's body each leg gets: one table by endpoint, used by every connector.

A field that the table does not name passes unread on both legs: unknown fields, key order and large integers reach the
worker as they were sent. D gets the client's body but for the fields with which workers talk about KV. P gets either
*one token* (its answer is thrown away: engines that are asked first) or *the same body* (it meets D while both run and
its token is the answer's first). `docs/endpoints.md` shows the table; it is written from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Raw

from omni_proxy.call import CHAT, COMPLETIONS, INTERNAL_FIELDS, MESSAGES, RESPONSES, Call, key_of, object_of

_NONE: Final[Mapping[str, bytes]] = {}


_Leg = Callable[[bytes, bytes, object, tuple[bytes, ...], tuple[bytes, ...], bytes], bytes]
try:
    from omni_proxy._body_scan import leg, names

    _leg: _Leg | None = leg
except ImportError:  # not built
    _leg = None


class _Rules:
    """The same rules as the scanner has them."""

    __slots__ = ("names", "otherwise", "values")

    def __init__(self, instead: Mapping[str, bytes], forced: Mapping[str, bytes]) -> None:
        codes: dict[str, int] = {}
        values, otherwise = [b""], [b""]
        for name, value in instead.items():
            if value:
                values.append(value)
                otherwise.append(forced.get(name, b""))
            codes[name] = len(values) if value else 1
        self.names: Final[object] = names(codes)
        self.values: Final[tuple[bytes, ...]] = tuple(values)
        self.otherwise: Final[tuple[bytes, ...]] = tuple(otherwise)


class LegFields:
    """What becomes of a body's fields. Values are JSON. `cap`: where the client sent the field; `force`: always."""

    __slots__ = ("_forced", "_instead", "_rules", "cap", "drop", "force")

    def __init__(
        self, drop: frozenset[str] = frozenset(), cap: Mapping[str, bytes] = _NONE, force: Mapping[str, bytes] = _NONE
    ) -> None:
        self.drop = drop
        self.cap = dict(cap)
        self.force = dict(force)
        self._instead: dict[str, bytes] = {**dict.fromkeys(drop, b""), **cap, **force}
        """What a leg gets in place of a field of the client's; empty: nothing."""
        self._forced = [(name, key_of(name) + value) for name, value in force.items()]
        self._rules = None if _leg is None else _Rules(self._instead, dict(self._forced))

    def body(self, call: Call, added: Sequence[tuple[str, bytes | Raw]] = ()) -> bytes:
        """A leg's body: the client's fields under these rules, in its order; what is forced; and what is added."""
        instead, rules = self._instead, self._rules
        if rules is not None and _leg is not None and call.places:
            tail: list[bytes | Raw] = []
            for name, value in added:
                if name not in instead:
                    return self.joined(call, added)
                tail.append(key_of(name))
                tail.append(value)
            return _leg(call.body, call.places, rules.names, rules.values, rules.otherwise, b"".join(tail))
        return self.joined(call, added)

    def joined(self, call: Call, added: Sequence[tuple[str, bytes | Raw]]) -> bytes:
        """What `body` says, without the scanner."""
        instead, fields = self._instead, call.fields
        parts: list[bytes | Raw] = []
        for name, _ in added:
            if name not in instead:
                instead = {**instead, name: b""}
        for name, value in fields.items():
            other = instead.get(name)
            if other is None:
                parts.append(key_of(name))
                parts.append(value)  # prompts are large: nothing of them is copied before all is joined
            elif other:
                parts.append(key_of(name))
                parts.append(other)
        for name, member in self._forced:
            if name not in fields:
                parts.append(member)
        for name, own in added:
            parts.append(key_of(name))
            parts.append(own)
        return object_of(parts)


_POINTLESS: Final = frozenset({"stream_options", "min_tokens", "min_completion_tokens", "n", "best_of"})
"""Of no use for one unstreamed token, or refused together with it."""

_ENDS_BY_ITSELF: Final = frozenset({"stop", "stop_token_ids", "stop_sequences", "include_stop_str_in_output"})
"""Would let P end by itself: then it hands nothing over."""

_OF_THE_ANSWER: Final = frozenset(
    {
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "thinking_token_budget",
    }
)
"""About tokens that D will make. `tools` and `tool_choice` are not among them: the prompt is rendered from them, and a
P whose prompt differs from D's hands over blocks of another prompt."""

_ONE_TOKEN_DROPS: Final = _POINTLESS | _ENDS_BY_ITSELF | _OF_THE_ANSWER | INTERNAL_FIELDS
_CAPS: Final = {"max_completion_tokens": b"1", "max_output_tokens": b"1"}
"""Every cap that the endpoint knows: one that is left alone would win over the others."""
_PLAIN: Final = {"stream": b"false"}
_BY_LENGTH: Final = {**_PLAIN, "ignore_eos": b"true"}
"""The token may be anything, also an end of sequence, so that P ends by length and hands over."""

ONE_TOKEN: Final[Mapping[str, LegFields]] = {
    CHAT: LegFields(_ONE_TOKEN_DROPS, _CAPS, {"max_tokens": b"1", **_BY_LENGTH}),
    COMPLETIONS: LegFields(_ONE_TOKEN_DROPS, _CAPS, {"max_tokens": b"1", **_BY_LENGTH}),
    # `text` holds the format of the answer; a response of P's that is stored would be found by its client.
    RESPONSES: LegFields(
        _ONE_TOKEN_DROPS | {"text", "include"},
        {},
        {"max_output_tokens": b"1", "store": b"false", **_BY_LENGTH},
    ),
    MESSAGES: LegFields(_ONE_TOKEN_DROPS | {"output_format"}, {}, {"max_tokens": b"1", **_PLAIN}),
}
"""P computes the prompt and one token that nobody will see."""

_SAME_DROPS: Final = frozenset({"stream_options"}) | INTERNAL_FIELDS
SAME_BODY: Final[Mapping[str, LegFields]] = dict.fromkeys(
    (CHAT, COMPLETIONS, RESPONSES, MESSAGES), LegFields(_SAME_DROPS, {}, _PLAIN)
)
"""P samples the first token of the answer as D will go on: everything that shapes it stays."""

DECODE: Final = LegFields(INTERNAL_FIELDS)
"""D: the client's body, to which the connector adds its own fields at the end."""


def one_token_body(call: Call, added: Sequence[tuple[str, bytes | Raw]] = ()) -> bytes:
    """The body of a P leg that is asked before D, with the connector's own fields."""
    return ONE_TOKEN[call.path].body(call, added)


def same_body(call: Call, added: Sequence[tuple[str, bytes | Raw]] = ()) -> bytes:
    """The body of a P leg that runs beside D, with the connector's own fields."""
    return SAME_BODY[call.path].body(call, added)
