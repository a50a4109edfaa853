"""Reports: Markdown, and the same as one page that holds its pictures and asks nothing of any network."""

import base64
import html
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from mpp.files import write_text

_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
_ONE = r"\(?[+−-]?\d[\d,.]*(e[+-]?\d+)?( ?%)?\)?"
_NUMBERS = re.compile(rf"{_ONE}(( | to | ± ){_ONE})*")  # 1,000 or 0.5 ± 0.1 or 50.1 (48.0 to 52.2)
# The policy holds even where a later text would bring something in. The empty icon keeps a browser from asking for one.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ground: #fff; --ink: #1f2328; --line: #d0d7de; --shade: #f3f5f7 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #15181c; --ink: #dfe3e8; --line: #3a4149; --shade: #20252b }}
}}
body {{ margin: 0; background: var(--ground); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif }}
main {{ max-width: 54rem; margin: 0 auto; padding: 1rem 1rem 4rem; overflow-wrap: break-word }}
h1, h2, h3 {{ line-height: 1.25; margin: 2em 0 .6em }}
h1 {{ font-size: 1.7rem; margin-top: .8em }}
h2 {{ font-size: 1.25rem; border-bottom: 1px solid var(--line); padding-bottom: .25em }}
code {{ font: .875em ui-monospace, monospace; background: var(--shade); border-radius: 4px; padding: .1em .3em }}
pre {{ overflow-x: auto; background: var(--shade); border-radius: 4px; padding: .8em }}
pre code {{ padding: 0 }}
ul, ol {{ padding-left: 1.5em }}
.table {{ overflow-x: auto; margin: 1em 0 }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }}
th, td {{ border-bottom: 1px solid var(--line); padding: .35em .7em; text-align: left; vertical-align: top }}
th {{ background: var(--shade); vertical-align: bottom }}
td[style] {{ white-space: nowrap }}
img {{ display: block; max-width: 100%; height: auto; margin: 1em 0; background: #fff }}
</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in the text too; columns of numbers stand to the right.

    A column is one of numbers where at least half of its filled cells are. Cells are Markdown; only what would break
    the table is changed in them.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    cells = [[_cell(cell) for cell in row] for row in (header, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    right = [_is_of_numbers(column[1:]) for column in columns]
    lines = [
        [cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(row, widths, right, strict=True)]
        for row in cells
    ]
    rule = ["-" * (width - 1) + ":" if end else "-" * width for width, end in zip(widths, right, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def _is_of_numbers(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and 2 * sum(_NUMBERS.fullmatch(cell) is not None for cell in filled) >= len(filled)


def write(folder: Path, text: str) -> None:
    """Writes report.md and, with its pictures inside, report.html.

    HTML and links in the text come out as text. A picture is PNG or SVG, with a path relative to the folder; one that
    can't be read leaves its caption and "(missing)", since a report must not be lost for a picture.

    Args:
        text: Markdown (CommonMark, with tables).
    """
    write_text(folder / "report.md", text)
    write_text(folder / "report.html", _page(folder, text))


def _page(folder: Path, text: str) -> str:
    # A link would lead out of a page that is passed on alone, and <name:part> would become one.
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "autolink", "reference"])
    tokens = reader.parse(text)
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                _take_in(folder, child)
    body = reader.renderer.render(tokens, reader.options, {})
    body = body.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    return _PAGE.format(title=html.escape(_title(tokens)), body=body)


def _take_in(folder: Path, image: Token) -> None:
    """Puts a picture into its token, or makes the token the text that it is missing."""
    name = unquote(str(image.attrs["src"]))
    try:
        kind, content = _KINDS[Path(name).suffix.lower()], (folder / name).read_bytes()
    except (KeyError, OSError, ValueError):  # another kind; not there; no possible name
        image.type, image.content = "text", f"{image.content or name} (missing)"
    else:
        image.attrs["src"] = f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _title(tokens: Sequence[Token]) -> str:
    """The first heading, without its marks."""
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            return "".join(part.content for part in heading.children or ())
    return "Report"
