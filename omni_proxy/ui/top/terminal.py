"""Draws the lines with curses, and obeys the keys. A thread reads the gateway, so that keys never wait for it."""

from __future__ import annotations

import contextlib
import curses
import locale
import threading
from typing import Final

from omni_proxy.ui.top.screen import render
from omni_proxy.ui.top.state import Source, State, Unreadable
from omni_proxy.ui.top.text import Line, Style

_LOOK_MS: Final = 100
_ESCAPE: Final = 27
_COLOURS: Final = {
    Style.GOOD: curses.COLOR_GREEN,
    Style.WARN: curses.COLOR_YELLOW,
    Style.BAD: curses.COLOR_RED,
    Style.PREFILL: curses.COLOR_BLUE,
    Style.DECODE: curses.COLOR_GREEN,
    Style.BOTH: curses.COLOR_CYAN,
}
_KEYS: Final = "q quit  p pause  ↑↓ scroll"


class _Reader(threading.Thread):
    """The last state that could be read, and why the next one could not."""

    def __init__(self, source: Source, first: State, interval_s: float) -> None:
        super().__init__(name="reader", daemon=True)
        self._source = source
        self._interval_s = interval_s
        self._end = threading.Event()
        self.state = first
        self.fault = ""

    def run(self) -> None:
        while not self._end.wait(self._interval_s):
            try:
                self.state, self.fault = self._source.read(), ""
            except Unreadable as exc:
                self.fault = str(exc)

    def end(self) -> None:
        """Read no more."""
        self._end.set()
        self.join()


def watch(source: Source, first: State, interval_s: float) -> None:
    """Show a gateway until somebody presses q. Raises KeyboardInterrupt."""
    locale.setlocale(locale.LC_ALL, "")
    reader = _Reader(source, first, interval_s)
    reader.start()
    try:
        curses.wrapper(lambda window: _Screen(window, reader).run())
    finally:
        reader.end()


class _Screen:
    def __init__(self, window: curses.window, reader: _Reader) -> None:
        self._window = window
        self._reader = reader
        self._top = 0
        self._state = reader.state
        self._paused = False
        self._styles = _styles()
        window.timeout(_LOOK_MS)

    def run(self) -> None:
        while True:
            if not self._paused:
                self._state = self._reader.state
            self._draw()
            if not self._obey(self._window.getch()):
                return

    def _obey(self, key: int) -> bool:
        page = max(self._window.getmaxyx()[0] - 3, 1)
        moves = {curses.KEY_DOWN: 1, ord("j"): 1, curses.KEY_UP: -1, ord("k"): -1}
        moves |= {curses.KEY_NPAGE: page, curses.KEY_PPAGE: -page, curses.KEY_HOME: -(10**6), curses.KEY_END: 10**6}
        if key == ord("p"):
            self._paused = not self._paused
        self._top += moves.get(key, 0)
        return key not in (ord("q"), ord("Q"), _ESCAPE)

    def _draw(self) -> None:
        height, width = self._window.getmaxyx()
        lines = render(self._state, width)
        room = max(height - 1, 1)
        self._top = max(0, min(self._top, len(lines) - room))
        self._window.erase()
        for y, line in enumerate(lines[self._top : self._top + room]):
            self._put(y, line, width)
        fault = self._reader.fault
        foot = fault or ("paused   " if self._paused else "") + _KEYS
        self._put(height - 1, [(foot, Style.BAD if fault else Style.DIM)], width)
        self._window.refresh()

    def _put(self, y: int, line: Line, width: int) -> None:
        x = 0
        for text, style in line:
            room = width - x - 1  # the last cell of the last line cannot be written
            if room <= 0:
                return
            self._window.addstr(y, x, text[:room], self._styles[style])
            x += len(text)


def _styles() -> dict[Style, int]:
    styles = dict.fromkeys(Style, curses.A_NORMAL)
    styles[Style.DIM], styles[Style.STRONG] = curses.A_DIM, curses.A_BOLD
    if curses.has_colors():
        curses.use_default_colors()
        for number, (style, colour) in enumerate(_COLOURS.items(), 1):
            curses.init_pair(number, colour, -1)
            styles[style] = curses.color_pair(number)
    with contextlib.suppress(curses.error):  # a terminal that cannot hide its cursor shows it
        curses.curs_set(0)
    return styles
