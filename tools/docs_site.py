"""Builds the documentation as a site: the pages of docs/, the list of all configs, and the API of faithful and amp8.

    ./launch.sh setup --extra docs
    .venv/bin/python tools/docs_site.py build/site

Pages keep their places and their relative links, so the same files are read in the repository and on the site. A link
to a page or a heading that is not there is an error. Nothing is downloaded, and the site loads nothing from elsewhere.
"""

import argparse
import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from shared.args import Refused  # noqa: E402
from tools import cli, find  # noqa: E402

CONFIG = ROOT / "docs" / "mkdocs.yml"
PAGES = ("*.md", "docs/*.md", "faithful/*.md", "amp8/*.md", "benchmarks/*.md")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
OUTSIDE = re.compile(r"[a-z]+:")
API = {  # page: its names, from their docstrings
    "faithful": ["faithful.accelerator.Accelerator", "faithful.errors", "faithful.plan", "faithful.backends.base",
                 "faithful.strategies.base"],
    "amp8": ["amp8.convert", "amp8.gradients", "amp8.linear", "amp8.report", "amp8.state"],
}  # fmt: skip


def gather(folder: Path) -> None:
    """Copies the pages, and every file that they link to, to the same places in `folder`."""
    queue = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    while queue:
        path = queue.pop()
        copied = folder / path.relative_to(ROOT)
        if copied.exists():
            continue
        cli.make_folder(copied.parent)
        shutil.copyfile(path, copied)
        if path.suffix == ".md":
            links = (link for link in LINK.findall(path.read_text()) if not OUTSIDE.match(link))
            linked = {(path.parent / link).resolve() for link in links}
            queue += sorted(file for file in linked if file.is_file() and file.is_relative_to(ROOT))
    (folder / "docs" / "all-configs.md").write_text("\n".join(all_configs()) + "\n")
    notebook = json.loads((ROOT / "docs" / "first_steps.ipynb").read_text())
    (folder / "docs" / "first_steps.md").write_text("\n".join(cells(notebook)) + "\n")
    for package, listed in API.items():
        headings = [f"## `{name}`\n\n::: {name}\n    options: {{show_root_toc_entry: false}}\n" for name in listed]
        text = f"# {package}, its API\n\nFrom the docstrings. [What it is for](../{package}/README.md).\n\n"
        (folder / "docs" / f"api-{package}.md").write_text(text + "\n".join(headings))


def all_configs() -> Iterator[str]:
    """The page of all configs: a table for each strategy, and each file in full."""
    yield "# All configs\n\nWhat the names mean: [Which config should I use?](configs.md#names)"
    for first, title in find.GROUPS.items():
        group = sorted((name for name in find.names("config") if name.startswith(first)), key=find.order)
        yield f"\n## {title}\n\n| config | what it does |\n|---|---|"
        yield from (f"| [`{name}`](#{name}) | {find.description(name)} |" for name in group)
        for name in group:
            yield f"\n### `{name}` {{ #{name} }}\n\n```yaml\n{find.config(name).read_text().rstrip()}\n```"


def cells(notebook: dict) -> Iterator[str]:
    """The notebook as a page."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield f"```python\n{text}\n```\n" if cell["cell_type"] == "code" else f"{text}\n"


def build(site: Path) -> None:
    """Writes the site. Raises Refused with all that is wrong with the pages."""
    try:
        from mkdocs.commands.build import build
        from mkdocs.config import load_config
        from mkdocs.exceptions import Abort, ConfigurationError
    except ImportError as error:
        raise Refused(f"{error.name} is missing: ./launch.sh setup --extra docs") from None
    wrong: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: wrong.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(heard)
    with tempfile.TemporaryDirectory() as folder:
        gather(Path(folder))
        try:
            build(load_config(str(CONFIG), docs_dir=folder, site_dir=str(site.resolve()), strict=True))
        except (Abort, ConfigurationError) as error:
            raise Refused(*(wrong or [str(error)])) from None
        finally:
            logging.getLogger("mkdocs").removeHandler(heard)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder to write; what is in it is replaced")
    args = parser.parse_args(argv)
    if args.site.exists() and any(args.site.iterdir()) and not (args.site / "search").is_dir():
        raise Refused(f"{args.site} is there, not empty, and no site: choose a new folder")
    build(args.site)
    print(f"{args.site}/index.html: {len(list(args.site.rglob('*.html')))} pages")


if __name__ == "__main__":
    cli.run(main)
