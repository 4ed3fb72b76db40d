"""mkdocs calls this: a site of the pages where they are, with a list of all configs and the API of faithful and amp8.

Pages keep their places and their relative links, so the same files are read in the repository and on the site. Nothing
is downloaded, and the site loads nothing from elsewhere.
"""

import atexit
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools import find  # noqa: E402

PAGES = ("*.md", "docs/*.md", "faithful/*.md", "amp8/*.md", "benchmarks/*.md")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
API = {  # page: its names, from their docstrings
    "faithful": ["faithful.accelerator.Accelerator", "faithful.errors", "faithful.plan", "faithful.backends.base",
                 "faithful.strategies.base"],
    "amp8": ["amp8.convert", "amp8.gradients", "amp8.linear", "amp8.report", "amp8.state"],
}  # fmt: skip


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.docs_dir = tempfile.mkdtemp(prefix="site-")
    atexit.register(shutil.rmtree, config.docs_dir, ignore_errors=True)
    gather(Path(config.docs_dir))
    return config


def gather(folder: Path) -> None:
    """Copies the pages, and every file that they link to, to the same places in `folder`."""
    queue = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    while queue:
        path = queue.pop()
        copied = folder / path.relative_to(ROOT)
        if copied.exists():
            continue
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
        if path.suffix == ".md":
            linked = {(path.parent / link).resolve() for link in LINK.findall(path.read_text()) if ":" not in link}
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
