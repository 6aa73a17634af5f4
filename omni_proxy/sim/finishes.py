"""When the jobs of a batch have all their tokens, counted in decode passes. Pure."""

from __future__ import annotations

import heapq

from omni_proxy.sim.job import Job, Where


class Finishes:
    """Running jobs by the pass in which each makes its last token. Who has left the batch since is passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Job]] = []

    def add(self, last_pass: int, job: Job) -> None:
        """A job has joined the batch under a serial of its own."""
        heapq.heappush(self._heap, (last_pass, job.joined_serial, job))

    def first(self) -> int:
        """The first pass in which a job ends; there must be one that runs."""
        while not _runs(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0]

    def take(self, passes: int) -> Job | None:
        """A job that has all its tokens after so many passes, once; None: there is none any more."""
        while self._heap and self._heap[0][0] <= passes:
            entry = heapq.heappop(self._heap)
            if _runs(entry):
                return entry[2]
        return None

    def clear(self) -> None:
        """The batch is gone."""
        self._heap.clear()


def _runs(entry: tuple[int, int, Job]) -> bool:
    """Is the job still in the batch, as it was when it joined?"""
    _, serial, job = entry
    return job.where is Where.RUNNING and job.joined_serial == serial
