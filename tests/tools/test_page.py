"""tools/page.py: one file that needs no network, is the same each time, and has colours that a stylesheet can change."""

import functools
import re

from tools import page

SERIES = [
    ("a", page.colour(0), [[1, 2.0, 1.9, 2.1], [2, 1.0, 0.5, 1.5]]),
    ("b", page.colour(9), [[1, 2, 2, 2], [2, 0.1, 0.1, 0.2]]),
]
PICTURES = {
    "intervals": page.intervals([("other seeds*", 0, -50, 50, page.DIM), ("a", 0.1, -0.5, 0.7, page.colour(0))], 1.0),
    "lines": page.lines(SERIES),
    "panels": page.panels(SERIES, SERIES[0][2]),
    "bars": page.bars(
        [("a", [(3, page.colour(0)), (2, page.colour(1))], "5 & more", False), ("b", [(1, page.colour(0))], "1", True)],
        "<unit>",
    ),
    "strip": page.strip([page.colour(i % 2) for i in range(70)]),
}


def made():
    parts = [
        page.picture(draw, f"What {name} show", page.legend([("a", page.colour(0))]), "./launch.sh")
        for name, draw in PICTURES.items()
    ]
    return page.whole(
        "A < B",
        "./launch.sh x",
        [("a", "equal within 1%")],
        [page.section("One", *parts, page.table(["h"], [["<1>"]]))],
        ["A note."],
    )


@functools.cache
def once():
    return made()


def test_the_page_asks_nobody_and_runs_nothing():
    text = once()
    assert not re.search(r"https?:|<script|<img|@import|src=|<iframe|url\((?!#)|<metadata|xmlns", text)
    assert set(re.findall(r'href="([^"]*)"', text)) - {"data:,"} <= {
        f"#{name}" for name in re.findall(r'id="([^"]*)"', text)
    }
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids)), "pictures of one page share no ids"
    assert "<title>A &lt; B</title>" in text and "<td>&lt;1&gt;</td>" in text and "5 &amp; more" in text


def test_each_picture_stands_there_twice_for_a_screen_and_for_a_phone():
    text = once()
    assert text.count("<figure>") == 5 and text.count("<svg") == 10
    assert text.count(f'viewBox="0 0 {page.WIDE} ') == text.count(f'viewBox="0 0 {page.NARROW} ') == 5


def test_every_colour_is_a_variable_of_the_style_sheet():
    text = once()
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert not re.search(r"#[0-9a-fA-F]{6}", drawn) and "font-family" not in drawn
    declared = set(re.findall(r"(--\w+): #", text))
    assert {f"--{name}" for name in page.VARIABLES.values()} <= declared and set(
        re.findall(r"var\((--\w+)\)", text)
    ) <= declared


def test_the_page_is_the_same_each_time():
    assert made() == once()


def test_an_interval_that_leaves_the_picture_does_not_set_its_scale():
    drawn = page.svg(PICTURES["intervals"], "x")
    assert "+1.6" in drawn and "+20" not in drawn


def test_a_picture_of_its_own_has_its_colours_with_it():
    text = page.standalone(PICTURES["intervals"], "x")
    assert "prefers-color-scheme: dark" in text and text.startswith("<svg xmlns=") and "--c7: #" in text
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
