"""Pictures of the pages that compare, the study and `show --html` write, and of the documentation's site, as a browser
shows them, for results/pages/.

    python benchmarks/page_pictures.py RUN_FOLDER
    python benchmarks/page_pictures.py --site build/site    of the site alone, which tools/docs_site.py has written

At the widths of a phone, a laptop and a large screen, light and dark, and printed: the first part of each page, small.
It needs playwright, Pillow and pdftoppm, of no extra here, and a Chromium: the one that `playwright install` fetches,
or the system's.
"""

import argparse
import io
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import ROOT
from PIL import Image

from tools import show

TO = ROOT / "results" / "pages"
SHOTS = [(390, "light"), (1280, "light"), (1280, "dark"), (1920, "light")]  # (pixels across, colours)
PRINTED = ("compare",)
SHOWN, WIDTH = 2.2, 640  # height of what is shown over its width; pixels across of a picture
SITE = {"site": "index.html", "site-configs": "docs/all-configs.html", "site-api": "docs/api-faithful.html"}
PAGES = {"compare": ROOT / "results/compare_text/report.html", "study": ROOT / "results/study/page.html"}


def small(png, file):
    """Writes a part of a screenshot as a small file."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image = image.crop((0, 0, image.width, min(image.height, int(SHOWN * max(image.width, 600)))))
    across = min(WIDTH, image.width)
    image.resize((across, image.height * across // image.width), Image.LANCZOS).save(file, quality=70, method=6)


def overflow(page):
    """Pixels by which the page, or a table in it, is wider than its place."""
    wide = "[document.documentElement, ...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
    return max(page.evaluate(wide))


def main():
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("run", type=Path, nargs="?", help="the folder of a run")
    what.add_argument("--site", type=Path, help="the folder of the site")
    args = parser.parse_args()
    TO.mkdir(exist_ok=True)
    widths = {}
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        if args.site:
            pages = {name: args.site.resolve() / file for name, file in SITE.items()}
        else:
            pages = PAGES | {"run": Path(folder, "run.html")}
            pages["run"].write_text(show.page_of(args.run))
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, file in pages.items():
            for across, colours in SHOTS:
                page = browser.new_page(viewport={"width": across, "height": 900}, color_scheme=colours)
                page.goto(file.as_uri())
                small(page.screenshot(full_page=True), TO / f"{name}-{across}-{colours}.webp")
                widths[f"{name}, {across}"] = overflow(page)
                page.close()
            if name in PRINTED:
                page = browser.new_page()
                page.goto(file.as_uri())
                page.pdf(path=f"{folder}/page.pdf", format="A4")
                page.close()
                for number in ("1", "3"):  # the answer; the table of results
                    png = subprocess.run(
                        ["pdftoppm", "-r", "75", "-f", number, "-l", number, "-png", f"{folder}/page.pdf"],
                        capture_output=True, check=True,
                    ).stdout  # fmt: skip
                    small(png, TO / f"{name}-printed-{number}.webp")
        browser.close()
    print(json.dumps(widths))


if __name__ == "__main__":
    main()
