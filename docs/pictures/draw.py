"""Draws the pictures of the documents: NAME.txt becomes NAME-light.svg and NAME-dark.svg. Run it after a change of a text.

A text has one line for each row of boxes, ``TITLE: SUBTITLE | TITLE: SUBTITLE >> NOTE``, and one for each arrow between two rows, ``-> LABEL``.
"""

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
COLORS = {  # box, border, text, small text, arrow
    "light": ("#f6f8fa", "#8c959f", "#1f2328", "#59636e", "#0969da"),
    "dark": ("#161b22", "#6e7681", "#e6edf3", "#9198a1", "#58a6ff"),
}
WIDTH, BOXES, ROW, ARROW, GAP = 860, 560, 52, 34, 10


def draw(text: str, theme: str) -> str:
    """One picture as SVG."""
    box, border, ink, small, arrow = COLORS[theme]
    parts, y = [], 4.0
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("->"):
            x = 40
            parts.append(f'<path d="M{x} {y + 3} V{y + ARROW - 8}" stroke="{arrow}" stroke-width="2"/>')
            parts.append(f'<path d="M{x - 5} {y + ARROW - 10} h10 l-5 8 z" fill="{arrow}"/>')
            parts.append(f'<text x="{x + 16}" y="{y + 21}" fill="{arrow}">{escape(line[2:].strip())}</text>')
            y += ARROW
            continue
        cells, _, note = line.partition(">>")
        names = cells.split("|")
        width = (BOXES - GAP * (len(names) - 1)) / len(names)
        for number, cell in enumerate(names):
            title, _, subtitle = (part.strip() for part in cell.partition(":"))
            x = 4 + number * (width + GAP)
            parts.append(
                f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{ROW}" rx="6" fill="{box}" stroke="{border}"/>'
            )
            parts.append(
                f'<text x="{x + 12:.0f}" y="{y + 22:.0f}" fill="{ink}" font-weight="600">{escape(title)}</text>'
            )
            parts.append(
                f'<text x="{x + 12:.0f}" y="{y + 40:.0f}" fill="{small}" font-size="12">{escape(subtitle)}</text>'
            )
        parts.append(
            f'<text x="{BOXES + 20}" y="{y + 31:.0f}" fill="{small}" font-size="13">{escape(note.strip())}</text>'
        )
        y += ROW + GAP * (not note)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4:.0f}" width="{WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="14">\n{body}\n</svg>\n'
    )


def pictures() -> dict[Path, str]:
    """Every picture that there is to be, by its file."""
    return {
        source.with_name(f"{source.stem}-{theme}.svg"): draw(source.read_text(), theme)
        for source in sorted(HERE.glob("*.txt"))
        for theme in COLORS
    }


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture)
