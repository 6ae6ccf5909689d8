"""Writes the parts of the reference that the code knows: what stands between ``<!-- NAME -->`` and ``<!-- end -->``.

Run it after a change of the command line, of an error, of a setting or of a metric.
"""

import argparse
import dataclasses
import errno
import inspect
import json
import re
import runpy
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierfs import errors
from tierfs.cli.app import GROUPS, ActionsParser, build_parser, load_command
from tierfs.cli.commands._status_prometheus import METRICS
from tierfs.session.settings import TierOptions

HERE = Path(__file__).parent
EVERYWHERE = {"--help", "--json", "--progress"}  # options that the page describes once


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    """A table in Markdown; no lines for one without rows."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |", *lines, ""] if lines else []


def usage(parser: argparse.ArgumentParser) -> str:
    """A usage on one line, without the option for help."""
    formatter = argparse.HelpFormatter(parser.prog, width=1000)
    formatter.add_usage(None, parser._actions[1:], parser._mutually_exclusive_groups, prefix="")
    return formatter.format_help().strip()


def options(parsers: dict[str, argparse.ArgumentParser]) -> Iterator[Sequence[str]]:
    """The options with their help, and for a command with actions the actions that have each."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, parser in parsers.items():
        for action in parser._actions:
            if action.option_strings and not EVERYWHERE & set(action.option_strings):
                text = (action.help or "") % {"default": action.default}
                rows.setdefault((", ".join(f"`{option}`" for option in action.option_strings), text), []).append(name)
    for (option, text), names in rows.items():
        yield (option, text) if names == [""] else (option, ", ".join(f"`{name}`" for name in names), text)


def command(name: str) -> list[str]:
    """What a command does, its usage, its options and its examples."""
    parser = build_parser(name)
    parsers = dict(parser.actions) if isinstance(parser, ActionsParser) else {"": parser}
    described = load_command(name)
    head = ["Option", "Actions", "Means"] if "" not in parsers else ["Option", "Means"]
    return [
        f"{described.line[0].upper()}{described.line[1:]}.",
        "",
        *("```", *map(usage, parsers.values()), "```", ""),
        *table(head, options(parsers)),
        *("```", *described.examples, "```"),
    ]


def groups() -> list[str]:
    """The commands, by what they are about."""
    return table(
        ["About", "Commands"],
        ((title, ", ".join(f"[{name}](#tierfs-{name})" for name in names)) for title, names in GROUPS.items()),
    )[:-1]


def plain(text: str) -> str:
    """The text of a docstring in Markdown, on one line."""
    return " ".join(text.split()).replace("``", "`")


def described(kind: type, title: str) -> dict[str, str]:
    """The names below one title of a docstring, each with its text."""
    section = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", inspect.getdoc(kind) or "", re.MULTILINE)
    items = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE)
    return {name: plain(text).rstrip(".") for name, text in items}


def error_classes() -> Iterator[type[errors.TierfsError]]:
    """The classes in the order of their exit codes."""
    kinds = [getattr(errors, name) for name in errors.__all__]
    return iter(sorted(set(kinds) - {errors.TierfsError}, key=lambda kind: (kind.exit_code, kind.__name__)))


def error_table() -> list[str]:
    """Every error with its bases, category, exit code and meaning."""
    rows = (
        (
            f"`{kind.__name__}`",
            ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.TierfsError)
            + (" (`ENOSPC`)" if kind.error_number == errno.ENOSPC else ""),
            f"`{kind.kind}`",
            str(kind.exit_code),
            plain((inspect.getdoc(kind) or "").partition("\n\n")[0]).rstrip("."),
        )
        for kind in error_classes()
    )
    return table(["Class", "Also a", "`kind`", "Exit code", "Means"], rows)[:-1]


def error_attributes() -> list[str]:
    """The attributes of the errors."""
    rows: dict[tuple[str, str], list[str]] = {}
    common = described(errors.TierfsError, "Args")
    for kind in [errors.TierfsError, *error_classes()]:
        for name, text in described(kind, "Args").items():
            if name != "message" and (kind is errors.TierfsError or name not in common):
                rows.setdefault((name, text), []).append("all" if kind is errors.TierfsError else f"`{kind.__name__}`")
    return table(
        ["Attribute", "Class", "Means"],
        ((f"`{name}`", ", ".join(kinds), text) for (name, text), kinds in rows.items()),
    )[:-1]


def settings() -> list[str]:
    """The settings of the local tiers, and their defaults."""
    texts = described(TierOptions, "Attributes")
    rows = (
        (f"`{field.name}`", *(part.strip().rstrip(".") for part in texts[field.name].partition("Default: ")[::2]))
        for field in dataclasses.fields(TierOptions)
    )
    return table(["Setting", "Means", "Default"], rows)[:-1]


def metrics() -> list[str]:
    """The metrics with their labels and help."""
    rows = (
        (f"`tierfs_{metric.name}`", ", ".join(f"`{label}`" for label in labels), metric.text.rstrip("."))
        for labels, group in METRICS
        for metric in group
    )
    return table(["Name", "Labels", "Means"], rows)[:-1]


def soak() -> list[str]:
    """The sums of the soak reports."""
    reports = sorted((HERE.parents[1] / "integration" / "bench" / "history").glob("*-soak-*.json"))
    runs = [json.loads(path.read_text())["figures"] for path in reports]

    def counted(name: str) -> str:
        total: Counter[str] = Counter()
        for run in runs:
            total.update(run.get(name, {}))
        shown = ", ".join(f"`{key}` {value:,}" for key, value in sorted(total.items(), key=lambda item: -item[1]))
        return f"**{sum(total.values()):,}**: {shown}" if shown else "0"

    names = ("kills", "faults", "flips", "damage", "gc", "operations", "acknowledged_bytes")
    rows = [(name.replace("_", " "), counted(name)) for name in names]
    failures = [
        (name.replace("_", " "), str(sum(run[name] for run in runs)))
        for name in ("losses", "wrong_bytes", "hangs", "errors")
    ]
    hours = sum(run["seconds"] for run in runs) / 3600
    return table(["Figure", "Count"], iter([("runs", f"{len(runs)}, {hours:.1f} hours"), *rows, *failures]))[:-1]


PARTS = {
    "api.md": {"names": runpy.run_path(str(HERE / "interface.py"))["stability"]},
    "cli.md": {"commands": groups, "metrics": metrics},
    "errors.md": {"classes": error_table, "attributes": error_attributes},
    "configuration.md": {"settings": settings},
    "reliability.md": {"soak": soak},
}


def pages() -> dict[Path, str]:
    """Every page as it is to be, by its file."""
    found = {}
    for page, parts in PARTS.items():

        def written(mark: re.Match[str], parts: dict = parts) -> str:
            name = mark[1]
            lines = command(name.removeprefix("tierfs ")) if name.startswith("tierfs ") else parts[name]()
            return "\n".join([f"<!-- {name} -->", "", *lines, "", "<!-- end -->"])

        path = next(HERE.parent.rglob(page))
        text = path.read_text()
        found[path] = re.sub(r"<!-- ((?!end)[\w ]+) -->\n.*?<!-- end -->", written, text, flags=re.DOTALL)
    return found


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page)
