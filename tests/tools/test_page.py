"""tools/page.py: one file that needs no network, is the same each time, and has colours that a stylesheet can change."""

import functools
import re

import pytest

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
}


def made():
    parts = [
        page.picture(draw, f"What {name} show", page.legend([("a", page.colour(0))])) for name, draw in PICTURES.items()
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
    assert text.count("<figure>") == 4 and text.count("<svg") == 8
    assert text.count(f'viewBox="0 0 {page.WIDE} ') == text.count(f'viewBox="0 0 {page.NARROW} ') == 4


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


def ticks(draw):
    """The labels of the y axis."""
    return [
        float(text.replace("\N{MINUS SIGN}", "-"))
        for text in re.findall(r">([\d.e\N{MINUS SIGN}-]+)</text>", page.svg(draw, "x"))
    ]


# A measure over the steps, and the least that its axis shows.
AXES = {
    "noise": ([0.970, 0.974, 0.978], 0.04),
    "zero": ([0.0, 0.0, 0.0], 0.0),
    "a change": ([0.5, 0.9, 0.97], 0.4),
}


@pytest.mark.parametrize("name", AXES)
def test_an_axis_makes_no_news_of_noise(name):
    values, least = AXES[name]
    draw = page.lines(
        [("a", page.colour(0), [[1000 * step, value, value, value] for step, value in enumerate(values, 1)])]
    )
    shown = [tick for tick in ticks(draw) if tick < 1000]
    assert max(shown) - min(shown) >= least


def test_a_column_with_a_sentence_is_broken_and_others_are_not():
    text = page.table(
        ["config", "loss", "verdict"], [["a", "1.25", "equal within 1%"], ["b", "1.5", "cannot tell: a, b"]]
    )
    assert "<td>1.25</td>" in text and text.count('class="words"') == 3  # its head, and both of its cells


def test_a_picture_of_its_own_has_its_colours_with_it():
    text = page.standalone(PICTURES["intervals"], "x")
    assert "prefers-color-scheme: dark" in text and text.startswith("<svg xmlns=") and "--c7: #" in text
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
