"""The documentation is correct: links resolve, every page is reachable, environment variables exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").glob("[CS]*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

CODE_COLUMNS_MAX = 124  # on the site, in a window of 1,300 pixels: docs/pictures/site.css


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {slug(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


def test_every_link_in_a_page_leads_somewhere():
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            file, _, base_offset = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            assert there.exists(), f"{page}: {target}"
            if base_offset:
                assert base_offset in headings(there), f"{page}: {target}"


def test_every_page_is_reached_from_the_index():
    reached = {ROOT / "README.md"}
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        for target in LINK.findall(page.read_text()):
            there = (page.parent / target.partition("#")[0]).resolve()
            if there.suffix == ".md" and there.exists() and there not in reached:
                reached.add(there)
                todo.append(there)
    assert reached >= set(PAGES), sorted(str(page) for page in set(PAGES) - reached)


@pytest.mark.parametrize("page", ["docs/explanation/architecture.md", ".github/CONTRIBUTING.md"])
def test_the_maps_of_the_code_name_what_is_there(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`(\w+)` in\s+`(tierfs/[\w/]+\.py)`", text)
    assert named
    for name, path in named:
        defined = re.compile(rf"^(?:async def |def |class )?{name}\b", re.MULTILINE)
        assert defined.search((ROOT / path).read_text()), f"{path} has no {name}"
    for path in re.findall(r"`(\.?\w+/[\w/.-]*|[\w./-]+\.py)`", text):
        assert "NAME" in path or (ROOT / path).exists(), f"{path} is not there, or is no path from the top"


def test_the_map_of_the_code_has_every_folder():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    named = re.findall(r"^\| `(tierfs/[\w/]+/)` \|", page, re.MULTILINE)
    inner = (path.parent for path in (ROOT / "tierfs").rglob("*.*") if "__pycache__" not in path.parts)
    deep = {f"{folder.relative_to(ROOT)}/" for folder in inner if len(folder.relative_to(ROOT).parts) == 3}
    assert set(named) == deep


def test_every_page_is_in_the_menu_of_the_site():
    menu = (ROOT / ".mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/") and f" {page}\n" not in menu} == set()


def test_no_two_decisions_have_one_number():
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("0*.md"))
    assert len({name[:4] for name in names}) == len(names), names


def test_every_environment_variable_that_is_read_is_documented():
    used = set()
    for path in (ROOT / "tierfs").rglob("*.py"):
        used |= set(re.findall(r"environ[^\n]*?\"(TIERFS_[A-Z_]+)\"", path.read_text()))
    documented = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert used, "the pattern finds nothing"
    for name in used:
        assert f"`{name}`" in documented


def test_the_top_level_holds_only_what_belongs_there():
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in listed.stdout.split("\n") if name}
    allowed = {"pyproject.toml", "tierfs", "tests", "integration", "docs", "README.md", "LICENSE"}
    assert {name for name in top if not name.startswith(".")} <= allowed


def test_every_error_is_in_the_reference_with_its_kind_and_exit_code():
    from tierfs import errors

    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind is not errors.TierfsError:
            assert re.search(
                rf"^\| `{name}` \|[^|]*\| `{kind.kind}` \| {kind.exit_code} \|", page, flags=re.MULTILINE
            ), name


def test_every_setting_of_the_local_tiers_is_in_the_reference():
    from tierfs.session import TierOptions

    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    for name in TierOptions.names():
        assert f"`.{name}`" in page or f"`tiers.{name}`" in page, name


def test_the_change_log_has_whole_versions_alone_and_each_change_is_a_file():
    text = (ROOT / "docs" / "changelog.md").read_text()
    assert "## Under way" not in text
    assert len(text.splitlines()) < 160
    assert text.rstrip().endswith("versions](reference/versions.md)."), "a change goes into .changes/, see CONTRIBUTING"
    for path in (ROOT / ".changes").glob("*"):
        assert re.fullmatch(r"\+[a-z0-9-]+\.change\.md", path.name), path.name
        assert 0 < len(path.read_text().split()) < 80, path.name


@pytest.mark.parametrize("script", ["draw.py", "plots.py", "record.py"])
def test_every_picture_is_what_its_source_says(script):
    import runpy

    draw = runpy.run_path(str(ROOT / "docs" / "pictures" / script))
    for path, picture in draw["pictures"]().items():
        assert path.read_text() == picture, f"{path.name}: run docs/pictures/{script}"
        assert len(picture) < 60_000, path.name
    shown = re.findall(r"!\[([^\]]+)\]\([\w./]*pictures/([\w-]+)\.svg\)", "".join(page.read_text() for page in PAGES))
    words = {name: " ".join(text.split()) for text, name in shown}
    for name, text in draw["alternatives"]().items():
        assert words.get(name) == text, f"no page shows {name}.svg with these words"


def test_no_line_of_code_is_wider_than_the_site():
    for page in PAGES:
        for block in re.findall(r"^```.*?^```", page.read_text(), re.DOTALL | re.MULTILINE):
            wide = [line for line in block.splitlines() if len(line) > CODE_COLUMNS_MAX]
            assert not wide or page.name in {"README.md", "cli.md"}, f"{page.relative_to(ROOT)}: {wide}"


def test_the_reference_has_what_the_code_knows():
    import runpy

    generate = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))
    for path, page in generate["pages"]().items():
        assert path.read_text() == page, f"{path.name}: run docs/reference/generate.py"
        for name in generate["PARTS"][path.name]:
            assert f"<!-- {name} -->" in page, f"{path.name} lacks the mark of {name}"


def test_every_row_of_the_trust_model_names_tests_that_exist():
    rows = re.findall(
        r"^\| (?!Access|---)(.*?) \|.*\| (.*?) ?\|$", (ROOT / ".github" / "SECURITY.md").read_text(), re.MULTILINE
    )
    assert rows
    for who, tests in rows:
        named = re.findall(r"`([^`]+)`", tests)
        assert named or who == "the host, as the same user"
        assert all("def test_" in (ROOT / path).read_text() for path in named), who
