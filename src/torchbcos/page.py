"""One self-contained HTML page that shows explanations beside their images and numbers."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

__all__ = ["Panel", "Section", "build_page", "png"]


@dataclass(frozen=True)
class Panel:
    """One picture with a line above and one below."""

    title: str
    picture: bytes  # a PNG
    caption: str = ""
    wide: bool = False  # as wide as the page, for plots


@dataclass(frozen=True)
class Section:
    """One image's share of the page: groups of panels, then a table."""

    title: str
    groups: Sequence[Sequence[Panel]]  # panels that belong together stay together
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def png(picture: np.ndarray) -> bytes:
    """Of uint8 [H, W, 3 or 4]."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=4)  # 9: 7 % smaller, 10 × slower
    return buffer.getvalue()


def build_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page's text: no script, no link, every picture inside."""
    body = "\n".join(_section(s) for s in sections)
    return _PAGE.format(title=html.escape(title), lead=html.escape(lead), body=body)


def _section(section: Section) -> str:
    groups = "\n".join(
        "<div class=panels>" + "".join(_panel(p, section.title) for p in group) + "</div>"
        for group in section.groups
    )
    table = ""
    if section.rows:
        head = "".join(f"<th scope=col>{html.escape(c)}</th>" for c in section.header)
        lines = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
            for row in section.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        table = f"<div class=table>{table}</div>"
    title = html.escape(section.title)
    return f"<section><h2>{title}</h2><div class=panels>{groups}</div>{table}</section>"


def _panel(panel: Panel, place: str) -> str:
    data = base64.b64encode(panel.picture).decode()
    title, caption = html.escape(panel.title), html.escape(panel.caption)
    seen = ", ".join(filter(None, (title, caption))) or html.escape(place)
    return (
        f"<figure{' class=wide' if panel.wide else ''}><div class=title>{title}</div>"
        f'<img alt="{seen}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; --ink: #1d2330; --soft: #667085; --line: #e3e6ec;
  --ground: #f6f7f9; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1180px; padding: 2.2rem 1.4rem 4rem; color: var(--ink);
  background: var(--ground); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }}
h1 {{ font-size: 1.55rem; margin: 0 0 .4rem; }}
h2 {{ font-size: 1.05rem; margin: 0 0 .9rem; overflow-wrap: anywhere; }}
.lead {{ color: var(--soft); max-width: 68ch; margin: 0 0 1.6rem; }}
section {{ background: #fff; border: 1px solid var(--line); border-radius: 12px;
  padding: 1.2rem 1.3rem; margin-bottom: 1.3rem; }}
.panels {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
figure {{ margin: 0; width: 224px; }}
figure img {{ width: 224px; height: auto; border-radius: 6px; border: 1px solid var(--line);
  display: block; background: #fff; image-rendering: pixelated; }}
figure.wide, figure.wide img {{ width: auto; max-width: 100%; border: 0;
  image-rendering: auto; }}
.title {{ font-weight: 600; font-size: .88rem; margin-bottom: .35rem; white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; }}
figcaption {{ color: var(--soft); font-size: .8rem; margin-top: .3rem; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin-top: 1.1rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; white-space: nowrap; padding: .28rem .9rem;
  border-bottom: 1px solid var(--line); }}
th {{ color: var(--soft); font-weight: 500; font-size: .82rem; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0;
  white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class=lead>{lead}</p>
{body}
</body>
</html>
"""
