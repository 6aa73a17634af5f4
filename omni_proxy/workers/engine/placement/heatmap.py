"""A self-contained HTML page with heat maps: layers down, ranks or experts across, the ratio to the mean as colour."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.draft import Floats

# ratio to the mean -> colour; idle is grey, the mean is pale, twice the mean and more is dark red
STOPS: Final = ((0.0, (90, 100, 120)), (0.5, (120, 170, 215)), (1.0, (245, 243, 235)), (1.25, (250, 190, 100)),
                (1.6, (225, 80, 50)), (2.5, (110, 10, 30)))  # fmt: skip
CELL_PX: Final = 6
WIDEST_PX: Final = 1600


@dataclass(frozen=True, slots=True)
class Map:
    """One picture: `ratios` [layers, columns] and what its columns are."""

    title: str
    columns: str
    ratios: Floats


def page(title: str, lines: list[str], maps: list[Map]) -> str:
    """The page: a heading, some lines of text, a colour scale and the maps."""
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    figures = "".join(_figure(one) for one in maps)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>'
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#222;background:#fff}"
        "figure{margin:1.5rem 0}img{image-rendering:pixelated;max-width:100%;border:1px solid #999}"
        ".scale span{display:inline-block;padding:.1rem .6rem;border:1px solid #999}</style>"
        f"<h1>{html.escape(title)}</h1>{notes}{_scale()}{figures}</html>\n"
    )


def png(ratios: Floats) -> bytes:
    """An RGB picture with one pixel per value."""
    pixels = colours(ratios)
    height, width = ratios.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def colours(ratios: Floats) -> NDArray[np.uint8]:
    """RGB [..., 3] by linear interpolation between STOPS."""
    at = [ratio for ratio, _ in STOPS]
    channels = [np.interp(ratios, at, [colour[channel] for _, colour in STOPS]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _figure(one: Map) -> str:
    layers, columns = one.ratios.shape
    width = min(WIDEST_PX, max(columns * CELL_PX, 300))
    peak = one.ratios.max(axis=1)
    caption = (
        f"{one.title}: {layers} layers down, {columns} {one.columns} across; max/mean {peak.mean():.3f} on average"
    )
    caption += f", {peak.max():.3f} in the worst layer ({int(peak.argmax())})"
    data = base64.b64encode(png(one.ratios)).decode()
    return (
        f'<figure><figcaption>{html.escape(caption)}</figcaption><img width="{width}" height="{layers * CELL_PX}" '
        f'alt="{html.escape(caption)}" src="data:image/png;base64,{data}"></figure>'
    )


def _scale() -> str:
    spans = "".join(
        f'<span style="background:rgb{colour};color:{"#fff" if sum(colour) < 380 else "#222"}">{ratio:g}</span>'
        for ratio, colour in STOPS
    )
    return f'<p class="scale">load / mean: {spans}</p>'


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
