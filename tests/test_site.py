"""The documentation site: every public name, method and page is in it, and no link within it is dead."""

import inspect
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import yaml

from tests.support import ROOT
from website.links import other_pages, site_links
from website.llms import Told, llms, text_of
from website.pages import ROOMS, generated_pages, methods, public_names, rows_with, studies
from website.terminal import drawn
from website.verdicts import VERDICTS, with_verdicts


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_in_the_reference(room: str) -> None:
    page = generated_pages()[f"reference/{room}.md"]
    exported = import_module("lit_fed.api" if room == "lit_fed" else room).__all__
    assert exported
    for name in exported:
        method_page = f"methods/{name}.md"
        if room == "lit_fed.methods" and method_page in generated_pages():
            assert f"[`{name}`](../{method_page})" in page
            assert f"::: {room}.{name}\n" in generated_pages()[method_page]
        else:
            assert f"::: {room}.{name}\n" in page or f"## {name}\n" in page, f"{room}.{name}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_class_and_function_says_what_it_is(room: str) -> None:
    module = import_module(room)
    for name in public_names(room):
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert (thing.__doc__ or "").strip(), f"{room}.{name}"


def test_every_method_has_a_page() -> None:
    """Also each that a file of configs/method names, in whatever class it is."""
    named = {yaml.safe_load(path.read_text())["algorithm"]["class_path"] for path in ROOT.glob("configs/method/*.yaml")}
    assert len(named) > 25
    assert named <= methods().keys()
    assert {f"methods/{name}.md" for name in methods()} <= generated_pages().keys()


def test_a_methods_page_has_what_one_asks_of_it() -> None:
    page = generated_pages()["methods/FedProx.md"]
    assert page.startswith("---\ntitle: FedProx\n---\n\n::: lit_fed.methods.FedProx\n")
    assert '"Federated Optimization in Heterogeneous Networks", MLSys 2020' in page
    assert "| `loss` | a loss that `training_step` returns" in page
    assert "lit-fed fit -c configs/quickstart.yaml -c configs/method/fedprox.yaml" in page
    assert "| `fedprox` | yes |" in page
    assert "| `objective` | The task's loss and the distance to the global model. |" in page
    assert "studies.md#fedprox_heterogeneity" in page
    assert "Of its own: the client × class picture" in generated_pages()["methods/UWA.md"]


def test_studies_are_found_by_the_method_that_a_cell_ends_with() -> None:
    """A row's file, a file of tuned/ and a setting may name it."""
    assert len(studies()) == len(list(ROOT.glob("configs/papers/*/studies/*.yaml")))
    where = {name: labels for name, _, labels in rows_with("FedDrPlus")}
    assert where["feddr_plus_figure6"] == ["FedDr+"]
    where = {name: labels for name, _, labels in rows_with("FedAvg")}
    assert where["classics"] == ["FedAvg", "FedAvg + KD", "FedAvg + LD", "FedAvg + FD"]


def test_links_lead_to_pages_and_else_to_the_repository() -> None:
    text = "[a](../README.md#methods) [b](own_data.md) [c](../examples/my_data.yaml) [d](../configs/data) [e](#here)"
    moved = site_links(text + "\n```text\n[f](../README.md)\n```\n", "docs/x.md", "x.md", "https://forge/lib")
    assert moved == (
        "[a](readme.md#methods) [b](own_data.md) [c](https://forge/lib/blob/main/examples/my_data.yaml) "
        "[d](https://forge/lib/tree/main/configs/data) [e](#here)\n```text\n[f](../README.md)\n```\n"
    )
    assert site_links("[a](docs/own_data.md)", "README.md", "readme.md", "") == "[a](own_data.md)"
    assert site_links("[a](no_such.md)", "docs/x.md", "x.md", "") == "[a](no_such.md)"  # which a strict build refuses


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    pages |= {*other_pages().values(), *generated_pages()}
    folders = tuple(re.findall(r"(?m)^ +- (\S+/)(?: |$)", text))
    assert folders == ("methods/",)
    left = [page for page in sorted(pages) if not page.startswith(folders)]
    assert not [page for page in left if not re.search(rf" {re.escape(page)}$", text, re.MULTILINE)]


def test_language_models_get_a_list_of_pages_and_their_text() -> None:
    pages = [
        Told("Start", "Get started", "get_started.html", "# Get started\n\n```sh\npip\n```\n\nRun [it](x.md). Twice."),
        Told(
            "Methods",
            "FedProx",
            "methods/FedProx.html",
            "---\ntitle: FedProx\n---\n\n::: lit_fed.methods.FedProx\n    options: {}\n\n## Paper\n",
        ),
    ]
    assert llms("lit_fed", "Federated learning", pages) == (
        "# lit_fed\n\n> Federated learning\n\n## Start\n\n- [Get started](get_started.html.md): Run it\n"
        "\n## Methods\n\n- [FedProx](methods/FedProx.html.md): Clients stay near the global model\n"
    )
    start, method = map(text_of, pages)
    assert start == "# Get started\n\n```sh\npip\n```\n\nRun [it](x.md). Twice.\n"
    assert "## lit_fed.methods.FedProx\n\n`FedProx(mu" in method  # its signature
    assert "For a negative μ." in method  # its docstring
    assert ":::" not in method
    assert "options:" not in method


def test_verdicts_have_colours_and_a_filter_where_claims_stand() -> None:
    row = "<tr><td>a</td><td>fails, not by Holm</td><td>holds</td></tr>"
    html = with_verdicts(f'<div class="claims"><table>{row}</table></div>')
    assert '<td class="verdict"><span class="fails">fails, not by Holm</span></td>' in html
    assert '<td class="verdict"><span class="holds">holds</span></td>' in html
    head = with_verdicts('<p><strong>equal</strong> <strong>Verdict</strong></p><div class="claims"></div>')
    assert '<p><span class="verdict equal">equal</span> <strong>Verdict</strong></p>' in head
    css = (ROOT / "docs/site.css").read_text(encoding="utf-8")
    for verdict in VERDICTS:
        assert f'class="show-{verdict}" checked' in html
        assert f".claims .{verdict} {{" in css
        assert f".show-{verdict}:not(:checked)" in css
    assert with_verdicts(f"<table>{row}</table>") == f"<table>{row}</table>"


# --- the built site --------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """A page's anchors, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and (link := found.get("href")):
            self.links.append(link)
        if tag in ("img", "script") and (source := found.get("src")):
            self.loaded.append(source)
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload") and (source := found.get("href")):
            self.loaded.append(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None:
        pytest.skip("the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder


@pytest.mark.long
def test_the_site_is_whole(site: Path) -> None:
    """Every name is where the inventory says, every link leads somewhere, and nothing is fetched from elsewhere."""
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    listed = {line.split(" ", 1)[0] for line in inventory.splitlines()}
    for room in ROOMS:
        for name in import_module("lit_fed.api" if room == "lit_fed" else room).__all__:
            thing = getattr(import_module(room), name)
            if getattr(thing, "__module__", "lit_fed").startswith("lit_fed"):
                assert f"{room}.{name}" in listed, f"{room}.{name}"
    told = (site / "llms.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^- \[.+?\]\((.+?)\.md\): \S", told, re.MULTILINE)  # a link and a sentence for each page
    assert {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"} == set(lines)
    assert len(lines) == told.count("\n- ")
    for page in lines:
        assert 0 < len((site / f"{page}.md").read_text(encoding="utf-8")) < 100_000, page  # a model's window holds it
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    for path, page in pages.items():
        assert ":math:" not in re.sub(r"<pre.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL), path
        for source in page.loaded:
            assert not urlsplit(source).netloc, f"{path.name} loads {source}"
            assert (path.parent / unquote(urlsplit(source).path)).is_file(), f"{path.name} loads {source}"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name} links to {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name} links to {link}"


def test_indices_are_subscripts_in_texts_and_stay_in_code() -> None:
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("latex2mathml")
    from website.mathml import Equations

    html = markdown.markdown("w_g and Δ_i, num_clients, `w_g`", extensions=[Equations()])
    subscripts = "<span>w<sub>g</sub></span> and <span>Δ<sub>i</sub></span>"
    assert html == f"<p>{subscripts}, num_clients, <code>w_g</code></p>"


def test_a_terminals_picture_has_its_lines_as_they_break_and_nothing_from_elsewhere() -> None:
    """140 of 150 letters are in the first line."""
    svg = drawn(f"\x1b[1mA & <b>\x1b[0m\r\n{'x' * 150}", "A & B")
    tree = ElementTree.fromstring(svg)
    assert tree.findtext("{http://www.w3.org/2000/svg}title") == "A & B"
    texts = [str(text.text).replace("\xa0", " ") for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.strip()] == ["A & <b>", "x" * 140, "x" * 10]
    for name in ("terminal_approval", "terminal_log"):
        svg = (ROOT / f"docs/assets/{name}.svg").read_text(encoding="utf-8")
        assert re.findall(r"https?:[^\"]*|url\([^#]|@import", svg) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("name", ["mark", "mark_dark", "round"])
def test_drawings_say_in_words_what_they_show(name: str) -> None:
    tree = ElementTree.parse(ROOT / f"docs/assets/{name}.svg")
    assert tree.findtext("{http://www.w3.org/2000/svg}title")
    shown = re.findall(r"!\[(.{20,})\]\(docs/assets/(\w+)\.svg\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {file for _, file in shown} == {"mark", "round"}
