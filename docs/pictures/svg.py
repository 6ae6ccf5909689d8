"""The frame, the colours and the text that all pictures share. They are readable in light and dark and 390 pixels wide."""

import textwrap
from html import escape

WIDTH = 440  # of every drawing: on a telephone, text of 13 is then 11 pixels high
SHOWN = 540  # pixels on a wide screen
MARGIN = 12
STYLE = """<style>
text { fill: #1f2328 } .small { fill: #59636e; font-size: 11px } .strong { font-weight: 600 }
.ground { fill: #ffffff; stroke: #d0d7de } .box { fill: #f6f8fa; stroke: #8c959f }
.line { stroke: #d0d7de } .aim { stroke: #59636e } .path { stroke: #0969da; stroke-width: 2; fill: none }
.blue { fill: #0969da } .red { fill: #cf222e } .grey { fill: #8c959f }
.kept { fill: #dafbe1; stroke: #1a7f37 } .lost { fill: #ffebe9; stroke: #cf222e } .found { fill: #ddf4ff; stroke: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .ground { fill: #0d1117; stroke: #3d444d } .box { fill: #161b22; stroke: #6e7681 }
  .line { stroke: #3d444d } .aim { stroke: #9198a1 } .path { stroke: #58a6ff }
  .blue { fill: #58a6ff } .red { fill: #f85149 } .grey { fill: #6e7681 }
  .kept { fill: #12261e; stroke: #3fb950 } .lost { fill: #25171c; stroke: #f85149 } .found { fill: #121d2f; stroke: #58a6ff }
}
</style>"""


def picture(height: float, parts: list[str], words: str, *, extra_style: str = "") -> str:
    """One picture as SVG. ``words`` say what it shows, for people who cannot see it."""
    body = "\n".join([STYLE, *([extra_style] if extra_style else []), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{SHOWN}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">\n<title>{escape(words)}</title>\n'
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, line: str, kind: str = "", *, anchor: str = "start") -> str:
    """One line of text, whose baseline is at ``y``."""
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(line)}</text>'


def wrapped(line: str, width: float, pixels: float = 13) -> list[str]:
    """A text in lines that are about ``width`` wide. A letter is taken for half as wide as it is high."""
    return textwrap.wrap(line, max(int(width / (pixels * 0.52)), 8))
