"""mpp/report.py: tables, and a page that needs nothing but itself."""

import base64
import html
import io
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import picture
from hypothesis import given
from hypothesis import strategies as st

from mpp import report

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="70" height="20"><rect width="70" height="20"/></svg>'
VOID = {"meta", "link", "img", "br", "hr"}


def png(size=(1500, 30)):
    content = io.BytesIO()
    picture(size=size).save(content, "PNG")
    return content.getvalue()


class Page(HTMLParser):
    """Elements as (name, attributes, text inside them), of a page whose tags must match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.declared = [], [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_decl(self, decl):
        self.declared = decl

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), ""]
        assert len(element[1]) == len(attrs)
        self.found.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, tag):
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def written(folder, text):
    report.write(folder, text)
    assert (folder / "report.md").read_text(encoding="utf-8") == text
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_a_table_is_aligned_and_its_numbers_stand_to_the_right():
    found = report.table(
        ["arm", "accuracy", "95 % interval", "seen", "x"],
        [
            ["from scratch", "9.5", "8.0 to 11.0", "nothing", "1e-05"],
            ["a|b", "failed", "", "1,000 images", "−2.5 %"],
            ["two\nlines", "10.0", "0.5 ± 0.1 (2)", "", ""],
        ],
    )
    assert found == (
        "| arm          | accuracy | 95 % interval | seen         |      x |\n"
        "| ------------ | -------: | ------------: | ------------ | -----: |\n"
        "| from scratch |      9.5 |   8.0 to 11.0 | nothing      |  1e-05 |\n"
        "| a\\|b         |   failed |               | 1,000 images | −2.5 % |\n"
        "| two lines    |     10.0 | 0.5 ± 0.1 (2) |              |        |"
    )


@pytest.mark.parametrize(
    ("cells", "right"),
    [
        (["1", "failed"], True),
        (["1", "failed", "not measured"], False),
        (["1", "", "", ""], True),
        (["50.1 52.3"], True),
        (["1e-05"], True),
        (["2.5 %"], True),
        (["+1.0 to −1.0"], True),
        (["12 images"], False),
        (["0.1: 53.0, 0.3: 54.0"], False),
        (["", ""], False),
        ([], False),
    ],
)
def test_a_column_of_numbers_is_one_where_half_of_it_is(cells, right):
    assert (":" in report.table(["header"], [[cell] for cell in cells]).splitlines()[1]) == right


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        report.table(["a", "b"], [["1"]])


@given(st.lists(st.lists(st.text("a1|<&`\\ \n", max_size=8), min_size=2, max_size=2), max_size=3))
def test_no_cell_breaks_its_table(rows):
    page = Page(report._page(Path(), report.table(["a", "b"], rows)))
    assert [len(page.all(tag)) for tag in ("table", "th", "td", "tr")] == [1, 2, 2 * len(rows), 1 + len(rows)]
    for (_, shown), cell in zip(page.all("td"), [cell for row in rows for cell in row], strict=True):
        if not {"`", "\\"} & set(cell):  # which are marks, and go
            assert shown == " ".join(cell.split())


def test_a_bar_that_is_escaped_already_is_left(tmp_path):
    text = report.table(["a|b", "c"], [[r"d\|e", "`f|g`"]])
    assert text.splitlines()[2] == r"| d\|e | `f\|g` |"
    page = written(tmp_path, text)
    assert [text for _, text in page.all("th") + page.all("td")] == ["a|b", "c", "d|e", "f|g"]


def test_the_page_is_whole_and_leads_nowhere(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "ä_50%.png").write_bytes(png())
    (tmp_path / "figures" / "b.SVG").write_bytes(SVG)
    page = written(
        tmp_path,
        "Before.\n\n# The `first` & *best* heading\n\n## Another\n\n"
        '- ![in "a" list](figures/ä_50%.png) and ![drawn](figures/b.SVG)\n\n'
        + report.table(["arm", "value"], [["a", "1"]])
        + "\n\n[a link](https://example.org) <https://example.org> <folder:x> [one][two]\n\n"
        + "[two]: https://example.org\n",
    )
    assert page.declared == "DOCTYPE html" and page.all("html")[0][0] == {"lang": "en"}
    assert page.all("meta")[0][0] == {"charset": "utf-8"}
    assert [text for _, text in page.all("title")] == ["The first & best heading"]
    assert page.all("h1")[0][1] == "The first & best heading"
    tags = {tag for tag, _, _ in page.found}
    assert not tags & {"script", "a", "iframe", "object", "form", "base"}
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [
        found for found, _ in page.all("meta")
    ]
    assert page.all("link") == [({"rel": "icon", "href": "data:,"}, "")]  # else a browser asks its server for one
    assert [found for found, _ in page.all("div")] == [{"class": "table", "tabindex": "0"}]  # scrolls by keyboard
    policy = next(found["content"] for found, _ in page.all("meta") if found.get("http-equiv"))
    assert policy.split("; ")[0] == "default-src 'none'"
    led = [value for _, found, _ in page.found for key, value in found.items() if key in ("src", "href", "srcset")]
    assert led and all(value.startswith("data:") for value in led)
    style = page.all("style")[0][1]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
    images = [found for found, _ in page.all("img")]
    assert [found["alt"] for found in images] == ['in "a" list', "drawn"]
    heads = [found["src"].split(",")[0] for found in images]
    assert heads == ["data:image/png;base64", "data:image/svg+xml;base64"]
    assert [base64.b64decode(found["src"].split(",")[1]) for found in images] == [png(), SVG]
    assert [found.get("style") for found, _ in page.all("td")] == [None, "text-align:right"]
    (text,) = [text for _, text in page.all("p") if "a link" in text]
    assert text == "[a link](https://example.org) <https://example.org> <folder:x> [one][two]"
    assert "[two]: https://example.org" in [text for _, text in page.all("p")]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["figures", "report.html", "report.md"]


def test_html_comes_out_as_text(tmp_path):
    name = "<script>alert(1)</script> & </table> <img src=x onerror=y>"
    text = f"# {name}\n\n<div onclick=z>\n\n{report.table([name], [[name], ['`</title>`']])}\n\n![{name}](no.png) \n"
    page = written(tmp_path, text)
    assert not {"script", "img"} & {tag for tag, _, _ in page.found} and len(page.all("div")) == 1
    assert page.all("title")[0][1] == page.all("h1")[0][1] == name
    assert [text for _, text in page.all("th") + page.all("td")] == [name, name, "</title>"]
    assert [text for _, text in page.all("p")] == ["<div onclick=z>", f"{name} (missing)"]
    assert "onclick" not in {key for _, found, _ in page.found for key in found}


@pytest.mark.parametrize(
    "name", ["figures/lost.png", "there.txt", "https://example.org/a.png", "a" * 300 + ".png", "%00.png", "folder.png"]
)
def test_a_missing_picture_leaves_its_caption(tmp_path, name):
    (tmp_path / "there.txt").write_text("no picture")
    (tmp_path / "folder.png").mkdir()
    page = written(tmp_path, f"# Results\n\n57.3\n\n![accuracy & loss]({name})\n")
    assert [text for _, text in page.all("p")] == ["57.3", "accuracy & loss (missing)"]
    assert page.all("img") == []


def test_a_missing_picture_without_a_caption_is_named(tmp_path):
    page = written(tmp_path, "![](figures/ä.png)")
    assert [text for _, text in page.all("p")] == ["figures/ä.png (missing)"]
    assert [text for _, text in page.all("title")] == ["Report"]


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_each_file_is_replaced_whole(tmp_path, monkeypatch, name):
    report.write(tmp_path, "# Old\n")
    before, replace = (tmp_path / name).read_bytes(), Path.replace

    def full_disk(self, target):
        if target.name == name:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr("pathlib.Path.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        report.write(tmp_path, "# New\n")
    assert (tmp_path / name).read_bytes() == before
    assert (tmp_path / "report.md").read_text() == ("# Old\n" if name == "report.md" else "# New\n")


# ---------------------------------------------------------------- in a browser

NAMES = (os.environ.get("CHROME") or "chromium", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
# A frame is of the page's own origin, so that a script of ours can look into it. Its color scheme is the page's.
FRAMES = """<!DOCTYPE html><meta charset="utf-8"><title>frames</title>
{frames}
<pre id="seen"></pre>
<script>
addEventListener("load", () => {{
  console.error("heard");
  const look = frame => {{
    const page = frame.contentDocument, style = name => frame.contentWindow.getComputedStyle(page.querySelector(name));
    return [
      page.documentElement.scrollWidth, ...[...page.images].map(image => image.naturalWidth),
      page.images[0].width, page.querySelector(".table").scrollWidth > page.querySelector(".table").clientWidth,
      style("body").backgroundColor, style("img").backgroundColor, style("td:last-child").textAlign,
      style("td:last-child").whiteSpace, style("html").colorScheme,
    ].join(" ");
  }};
  document.getElementById("seen").textContent = [...document.querySelectorAll("iframe")].map(look).join(";");
}});
</script>
"""


def opened(page, profile):
    """The document that a browser made of a page, and what was said on its console."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    done = subprocess.run(
        [BROWSER, *flags, f"--user-data-dir={profile}", "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_it_without_complaint(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.svg").write_bytes(SVG)
    wide = report.table([f"a long title {i}" for i in range(9)], [[f"number {i}" for i in range(8)] + ["0.5 ± 0.1"]])
    report.write(tmp_path, f"# Results\n\n{wide}\n\n![a](a.png) ![b](b.svg)\n\n`{'x' * 300}`\n")

    document, console = opened(tmp_path / "report.html", tmp_path / "profile")
    assert console == []
    assert Page(document).all("td")[8] == ({"style": "text-align:right"}, "0.5 ± 0.1")

    source = html.escape((tmp_path / "report.html").read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe width="{width}" height="300" style="border: 0; color-scheme: {scheme}" srcdoc="{source}"></iframe>'
        for width, scheme in [(360, "light"), (1200, "dark")]
    )
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames), encoding="utf-8")
    document, console = opened(tmp_path / "frames.html", tmp_path / "profile")
    assert len(console) == 1 and "heard" in console[0]  # so that complaints would have been heard
    phone, desk = re.search('<pre id="seen">(.*?)</pre>', document)[1].split(";")
    white = "rgb(255, 255, 255)"
    # The page is as wide as the screen, less a scroll bar; the pictures are whole; the table scrolls within the page.
    ours, first, second, shown, *rest = phone.split(" ", 4)
    assert (int(first), int(second)) == (1500, 70) and 300 < int(shown) < int(ours) <= 360
    assert rest == [f"true {white} {white} right nowrap light dark"]
    ours, first, second, shown, *rest = desk.split(" ", 4)
    assert (int(first), int(second)) == (1500, 70) and 600 < int(shown) < 1000 and int(ours) <= 1200
    assert rest[0].endswith(f" {white} right nowrap light dark") and "rgb(21, 24, 28)" in rest[0]
