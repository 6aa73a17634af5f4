"""SGLang's disaggregation: both legs get the same body at once and meet in a bootstrap room on P."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from omni_proxy.call import Call, append_fields
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.base import NO_IDS, Peer, PrefillAnswer, read_usage_and_params


class Sglang:
    """Parallel only: D waits for P's push."""

    name = "sglang"
    modes = (Mode.PARALLEL,)
    handoff_reusable = False
    ids_fields = NO_IDS

    def prefill_body(self, call: Call, room: int, prefill: Peer) -> bytes:
        # P's own answer is never shown; unstreamed it is one small object to read.
        extra = [*self.decode_fields(room, prefill, None), ("stream", b"false")]
        drop = {"stream_options"} & call.fields.keys()
        if not drop:
            return append_fields(call, extra)
        fields = {k: v for k, v in call.fields.items() if k not in drop}
        return append_fields(msgspec.structs.replace(call, fields=fields, tampered=True), extra)

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, _ = read_usage_and_params(body)
        return PrefillAnswer(Raw(b"null"), usage)

    def decode_fields(self, room: int, prefill: Peer | None, handoff: Raw | None) -> list[tuple[str, bytes]]:
        if prefill is None:
            return []
        host = f"[{prefill.host}]" if ":" in prefill.host else prefill.host
        port = b"null" if prefill.bootstrap_port is None else b"%d" % prefill.bootstrap_port
        return [
            ("bootstrap_host", msgspec.json.encode(host)),
            ("bootstrap_port", port),
            ("bootstrap_room", b"%d" % room),
        ]

    def release(self, handoff: Raw) -> tuple[str, bytes] | None:
        return None
