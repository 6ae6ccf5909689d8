"""Draws the boxes of the documents: NAME.txt becomes NAME.svg. Run it after a change of a text or of the page of levels.

The first line of a text says in words what the picture shows. Then each line is a row of boxes, ``TITLE: SUBTITLE | TITLE:
SUBTITLE >> NOTE``, an arrow between two rows, ``-> LABEL``, or a question with the box that its yes leads to, ``? QUESTION
= TITLE: SUBTITLE``. `levels.svg` is the table of docs/reference/levels.md.
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from svg import MARGIN, WIDTH, picture, text, wrapped  # noqa: E402 - it lies beside this script

INNER, GAP = WIDTH - 2 * MARGIN, 8
QUESTION = 196  # pixels
LEVELS = HERE.parent / "reference" / "levels.md"
COLUMNS = {  # a column of the table of levels, and its name in the picture
    "Crash of the process": "process crashes",
    "End of its container": "container ends",
    "Crash of the host": "host crashes",
    "Loss of the host": "host is lost",
    "A flipped bit in one copy": "a bit flips",
}

CONDITIONS = {  # a part of a condition in that table, and its lines in the picture
    "and `/dev/shm`": ["if /dev/shm", "outlives it"],
    "the disk is": ["if the disk is"],
    "directory of this host": ["if not on", "its own disk"],
    "one of these lives": ["if a holder", "lives"],
}


def box(x: float, y: float, width: float, cell: str, note: str = "") -> tuple[list[str], float]:
    """A box with a title, a subtitle and a note, and its height."""
    title, _, subtitle = (part.strip() for part in cell.partition(":"))
    lines = [(line, "strong") for line in wrapped(title, width - 16)]
    lines += [(line, "small") for line in wrapped(subtitle, width - 16, 11)]
    lines += [(line, "blue small") for line in wrapped(note.strip(), width - 16, 11)]
    height = 12 + 16 * len(lines)
    parts = [text(x + 10, y + 20 + 16 * number, line, kind) for number, (line, kind) in enumerate(lines)]
    return parts, height


def framed(x: float, y: float, width: float, height: float, parts: list[str]) -> list[str]:
    frame = f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6"/>'
    return [frame, *parts]


def draw(source: str) -> str:
    """One picture."""
    words, *rows = filter(None, (line.strip() for line in source.splitlines()))
    parts: list[str] = []
    y = float(MARGIN)
    for row in rows:
        if row.startswith("->"):
            lines = wrapped(row[2:].strip(), INNER - 30, 12)
            height = 12 + 15 * len(lines)
            parts.append(arrow(26, y + 3, 26, y + height - 3))
            parts += [text(42, y + 16 + 15 * number, line, "small") for number, line in enumerate(lines)]
            y += height
        elif row.startswith("?"):
            y = question(parts, y, row[1:].strip())
        else:
            cells, _, note = row.partition(">>")
            names = cells.split("|")
            width = (INNER - GAP * (len(names) - 1)) / len(names)
            boxes = [box(MARGIN + at * (width + GAP), y, width, name, note) for at, name in enumerate(names)]
            height = max(height for _, height in boxes)
            for at, (inside, _) in enumerate(boxes):
                parts += framed(MARGIN + at * (width + GAP), y, width, height, inside)
            y += height + GAP * (not note)
    return picture(y + MARGIN, parts, words)


def question(parts: list[str], y: float, row: str) -> float:
    """Add a question, the box that its yes leads to, and the arrow of its no. Return the end."""
    asked, _, cell = row.partition("=")
    lines = wrapped(asked.strip(), QUESTION)
    x = MARGIN + QUESTION + 40
    inside, height = box(x, y, WIDTH - MARGIN - x, cell.strip())
    height = max(height, 16 * len(lines) + 12)
    parts += framed(x, y, WIDTH - MARGIN - x, height, inside)
    parts += [text(MARGIN, y + 20 + 16 * number, line) for number, line in enumerate(lines)]
    parts.append(arrow(MARGIN + QUESTION, y + height / 2, x - 3, y + height / 2))
    parts.append(text(MARGIN + QUESTION + 2, y + height / 2 - 5, "yes", "small"))
    parts.append(arrow(MARGIN + 14, y + height + 2, MARGIN + 14, y + height + 19))
    parts.append(text(MARGIN + 22, y + height + 14, "no", "small"))
    return y + height + 22


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """An arrow to the right or down."""
    head = "l-7 -4 v8 z" if to_y == y else "l-4 -7 h8 z"
    return f'<path class="path" d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}"/><path class="blue" d="M{to_x:.1f} {to_y:.1f} {head}"/>'


def levels() -> str:
    """The table of the page of levels: what each crash leaves of a save, by the level that it has reached."""
    head, *table = table_of_levels()
    left, width, height = 64, (WIDTH - MARGIN - 64) / len(COLUMNS), 58
    parts = []
    for column, name in enumerate(COLUMNS.values()):
        x = left + width * (column + 0.5)
        parts += [
            text(x, 24 + 14 * at, line, "small", anchor="middle") for at, line in enumerate(wrapped(name, 66, 11))
        ]
    for number, row in enumerate(table):
        y = 52 + number * (height + 6)
        parts.append(text(MARGIN, y + height / 2 + 4, row[0].strip("`"), "strong"))
        for column, title in enumerate(COLUMNS):
            outcome = row[head.index(title)]
            kind, rest = re.match(r"(kept|lost|found)\b,?\s*(.*)", outcome).groups()
            x = left + width * column
            parts.append(
                f'<rect class="{kind}" x="{x + 2:.1f}" y="{y}" width="{width - 4:.1f}" height="{height}" rx="5"/>'
            )
            lines = next((lines for part, lines in CONDITIONS.items() if part in rest), [])
            top = y + height / 2 + 5 - 7 * len(lines)
            parts.append(text(x + width / 2, top, kind, "strong", anchor="middle"))
            parts += [
                text(x + width / 2, top + 14 * at, line, "small", anchor="middle") for at, line in enumerate(lines, 1)
            ]
    parts.append(
        text(
            MARGIN, 52 + len(table) * (height + 6) + 14, "found: a read notices the bit and uses the next copy", "small"
        )
    )
    return picture(52 + len(table) * (height + 6) + 26, parts, words_of_levels())


def table_of_levels() -> list[list[str]]:
    """The head and the four rows of the table, in cells."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in LEVELS.read_text().splitlines()]
    begin = next(number for number, row in enumerate(rows) if row[0] == "Reached")
    return [rows[begin], *rows[begin + 2 : begin + 6]]


def words_of_levels() -> str:
    """The picture of the levels in words."""
    _, *table = table_of_levels()
    lost = {row[0].strip("`"): sum(cell.startswith("lost") for cell in row) for row in table}
    return "Crashes of four kinds and a save: " + ", ".join(
        f"{level} is lost in {count} of 4 crashes" if count else f"{level} is lost in none"
        for level, count in lost.items()
    )


def alternatives() -> dict[str, str]:
    """Each picture in words, by its name. A page that shows it has these words."""
    return {source.stem: source.read_text().split("\n")[0] for source in HERE.glob("*.txt")} | {
        "levels": words_of_levels()
    }


def pictures() -> dict[Path, str]:
    """Every picture that there is to be, by its file."""
    drawn = {source.with_suffix(".svg"): draw(source.read_text()) for source in sorted(HERE.glob("*.txt"))}
    return drawn | {HERE / "levels.svg": levels()}


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg)
