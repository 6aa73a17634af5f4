"""SGLang's disaggregation: both legs get the same body at once and meet in a bootstrap room on P.

A leg whose connection is closed is found by the engine seconds later, and one that waits for the other side perhaps not
before its own time limit (300 s). So both legs get an id of ours, by which they are aborted. The engine takes an id for
the beginning of ids: nobody else's may begin with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Usual
from omni_proxy.workers.connectors.fields import same_body
from omni_proxy.workers.connectors.pair import Pair, Peer

_ROOMS = 2**63


class Sglang(Usual):
    """Parallel only: D waits for P's push."""

    name = "sglang"
    modes = (Mode.PARALLEL,)
    aborts_by_call = True
    controls: Mapping[str, str] = {
        "/sleep": "/release_memory_occupation",
        "/wake_up": "/resume_memory_occupation",
        "/pause": "/pause_generation",
        "/resume": "/continue_generation",
        "/reset_prefix_cache": "/flush_cache",
    }

    def request_id(self, pair: Pair) -> bytes:
        return pair.unique_id

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        # P's own answer is never shown; unstreamed it is one small object to read.
        extra = [*meeting(pair), self._rid(pair), *_rank("routed_dp_rank", pair.prefill)]
        return same_body(call, extra)

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, _ = read_usage_and_params(body)
        return PrefillAnswer(b"null", usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        ranks = [*_rank("routed_dp_rank", pair.decode), *_rank("disagg_prefill_dp_rank", pair.prefill)]
        return [*meeting(pair), self._rid(pair), *ranks]

    def abort(self, request_id: bytes) -> tuple[str, bytes] | None:
        return "/abort_request", b'{"rid":%b,"abort_all":false}' % _quoted(request_id)

    def _rid(self, pair: Pair) -> tuple[str, bytes]:
        return "rid", _quoted(self.request_id(pair))


def _quoted(request_id: bytes) -> bytes:
    return msgspec.json.encode(request_id.decode())


def meeting(pair: Pair) -> list[tuple[str, bytes]]:
    """Where both meet. A P that is told no rank takes the remainder of the room for it: it is made to be that one."""
    prefill = pair.prefill
    if prefill is None:
        return []
    host = f"[{prefill.host}]" if ":" in prefill.host else prefill.host
    port = b"null" if prefill.bootstrap_port is None else b"%d" % prefill.bootstrap_port
    return [
        ("bootstrap_host", msgspec.json.encode(host)),
        ("bootstrap_port", port),
        ("bootstrap_room", b"%d" % _room(pair.room, prefill)),
    ]


def _room(room: int, prefill: Peer) -> int:
    if prefill.rank is None:
        return room
    size = prefill.dp_size
    aligned = room - room % size + prefill.rank
    return aligned if aligned < _ROOMS else aligned - size


def _rank(field: str, peer: Peer | None) -> list[tuple[str, bytes]]:
    return [] if peer is None or peer.rank is None else [(field, b"%d" % peer.rank)]
