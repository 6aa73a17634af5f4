"""What operators have ordered about workers, over what config and discovery say of them. No IO, no clock.

Gateways of one group share their orders: of two about one worker the later counts, so that whoever was out of touch
and whoever was not end with the same. An order that was taken back is remembered for a while, for those who missed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from pydantic import ValidationError

from omni_proxy.config import Worker
from omni_proxy.messages import Role

ADMIN: Final = "admin"
"""The source of workers that operators have added."""
FORGET_S: Final = 3600.0
"""So long it is remembered that an order was taken back."""


class Order(Struct, frozen=True, omit_defaults=True):
    """All that is ordered about one worker; what is None is as its source says."""

    at: float
    """Seconds since the epoch, of the gateway that took the order."""
    drained: bool | None = None
    removed: bool = False
    weight: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    role: Role | None = None
    added: dict[str, Any] | None = None
    """The worker itself, where an operator has added it."""

    def is_empty(self) -> bool:
        """Does it say nothing any more?"""
        return self == Order(self.at)


_DECODER: Final = msgspec.json.Decoder(Order)
_ENCODER: Final = msgspec.json.Encoder()


class Orders:
    """The orders by worker."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._added: dict[str, Worker] = {}

    def get(self, name: str) -> Order:
        """What is ordered about a worker; an empty order where nothing is."""
        return self._orders.get(name) or Order(0.0)

    def put(self, name: str, order: Order) -> bytes:
        """Order something; the order as it travels. Raises ValueError where the worker that it adds is none."""
        later = msgspec.structs.replace(order, at=max(order.at, self.get(name).at + 1e-6))
        self._take(name, later)
        return _ENCODER.encode(later)

    def merge(self, shared: Mapping[str, bytes], now: float) -> tuple[bool, dict[str, bytes | None], list[str]]:
        """Take over what all gateways know.

        Returns whether anything has changed here; what the others have to hear of (None: to be forgotten); and the
        workers whose shared order makes no sense, which is ignored.
        """
        changed, faulty, tell = False, [], dict[str, bytes | None]()
        theirs: dict[str, Order] = {}
        for name, data in shared.items():
            try:
                theirs[name] = order = _DECODER.decode(data)
                if order.at > self.get(name).at:
                    changed |= self._take(name, order)
            except ValueError:  # also msgspec's and pydantic's
                faulty.append(name)
        for name, order in list(self._orders.items()):
            known = theirs.get(name)
            old = order.is_empty() and order.at < now - FORGET_S
            if old:
                del self._orders[name]
            if old and name in shared:
                tell[name] = None
            elif not old and (known is None or known.at < order.at):
                tell[name] = _ENCODER.encode(order)
        return changed, tell, faulty

    def added(self) -> list[Worker]:
        """The workers that operators have added."""
        return [self._added[name] for name in sorted(self._added)]

    def applied(self, workers: Iterable[Worker]) -> list[Worker]:
        """The workers as they are to be used."""
        return [_as_ordered(w, self.get(w.name)) for w in workers if not self.get(w.name).removed]

    def _take(self, name: str, order: Order) -> bool:
        worker = None if order.added is None else _worker(name, order.added)
        before = self.get(name)
        self._orders[name] = order
        if worker is None:
            self._added.pop(name, None)
        else:
            self._added[name] = worker
        return msgspec.structs.replace(before, at=order.at) != order


def _worker(name: str, fields: Mapping[str, Any]) -> Worker:
    try:
        worker = Worker.model_validate(fields)
    except ValidationError as exc:
        raise ValueError(str(exc)) from exc
    if worker.name != name:
        raise ValueError(f"the order for {name} adds {worker.name}")
    return worker


def _as_ordered(worker: Worker, order: Order) -> Worker:
    named: Sequence[tuple[str, object]] = (("down", order.drained), ("weight", order.weight), ("role", order.role))
    update = {field: value for field, value in named if value is not None}
    return worker.model_copy(update=update) if update else worker
