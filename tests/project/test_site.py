"""The documentation builds as a site, without the network, and a link that leads nowhere is an error."""

import json
import re
import shutil
import socket

import pytest
from conftest import ROOT

from tools import find

pytest.importorskip("mkdocs", reason="./launch.sh setup --extra docs")
pytest.importorskip("mkdocstrings", reason="./launch.sh setup --extra docs")
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort


def built_at(folder, site):
    build(load_config(str(folder / "mkdocs.yml"), site_dir=str(site), strict=True))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")

    def refuses(*_):
        raise OSError("the site is built without the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuses)
        built_at(ROOT, folder)
    return folder


def test_every_page_is_there(built):
    pages = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").glob("*.md")}
    assert not [page for page in pages if not (built / f"{page}.html").is_file()]
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert {f"{page}.md" for page in pages} <= {*nav}, "each page is in the navigation"


def test_all_configs_and_the_public_names_can_be_found(built):
    texts = {
        entry["location"]: entry["text"]
        for entry in json.loads((built / "search" / "search_index.json").read_text())["docs"]
    }
    for name in find.names("config"):
        assert f"docs/all-configs.html#{name}" in texts
    for name in ("faithful.accelerator.Accelerator.save_model", "faithful.errors.Refused"):
        assert f"docs/api-faithful.html#{name}" in texts
    assert "docs/api-amp8.html#amp8.convert.initialize" in texts


def test_nothing_is_loaded_from_elsewhere(built):
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*rel=[\"']?(?:stylesheet|preload|icon|preconnect)[^>]*href=[\"']?(?:https?:)?//"
    )
    assert loads.search('<script src="https://a.b/c.js">') and loads.search('<link rel="stylesheet" href="//a.b">')
    assert not [page.name for page in built.rglob("*.html") if loads.search(page.read_text())]


@pytest.mark.parametrize("link", ["configs.md#no-such-heading", "no-such-page.md", "../results/no_such_file.json"])
def test_a_link_that_leads_nowhere_is_an_error(tmp_path, caplog, link):
    for folder in ("docs", "faithful", "amp8"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    hooks = tmp_path / "docs" / "hooks.py"
    hooks.write_text(
        re.sub(r"^API = {.*?^}", 'API = {"faithful": [], "amp8": []}', hooks.read_text(), flags=re.M | re.S)
    )
    for page in re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("# A page\n\n## Names\n")
    built_at(tmp_path, tmp_path / "site")
    (tmp_path / "docs" / "fp8.md").write_text(f"# FP8\n\n[there]({link})\n")
    with pytest.raises(Abort):
        built_at(tmp_path, tmp_path / "site")
    assert link.split("#")[0].lstrip("./") in caplog.text
