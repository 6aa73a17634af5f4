"""P's side of handoffs: which jobs hold KV for a pull, by name and by room. Pure."""

from __future__ import annotations

from collections.abc import Callable

from omni_proxy.sim.job import Job

Found = Callable[[str], None]


class Holds:
    """Held jobs. Whoever asks for a room before its prompt is computed hears of it then."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._rooms: dict[int, str] = {}
        self._room_of: dict[str, int] = {}
        self._asking: dict[int, Found] = {}

    def put(self, name: str, job: Job, room: int | None) -> None:
        """Hold a job."""
        self._jobs[name] = job
        if room is None:
            return
        asking = self._asking.pop(room, None)
        if asking is not None:
            asking(name)
        else:
            self._rooms[room] = name
            self._room_of[name] = room

    def take(self, name: str) -> Job | None:
        """Hold it no longer; None where it is not held."""
        room = self._room_of.pop(name, None)
        if room is not None:
            self._rooms.pop(room, None)
        return self._jobs.pop(name, None)

    def ask(self, room: int, found: Found) -> None:
        """Have `found` called with the name of the job of a room, now or when it is there."""
        name = self._rooms.pop(room, None)
        if name is not None:
            self._room_of.pop(name, None)
            found(name)
        else:
            self._asking[room] = found

    def forget(self, room: int) -> None:
        """Whoever asked for the room has gone."""
        self._asking.pop(room, None)
