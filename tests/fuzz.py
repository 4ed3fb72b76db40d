"""What a fuzzer gives a reader: valid values with a few places changed, and their bytes with a few bytes changed."""

import copy
from functools import reduce

from hypothesis import strategies as st

STRANGE = [None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, float("nan"),
           float("inf"), "", " ", "auto", "no", "none", "NO", "all", "true", "-1", "1e9", "5GB", "0x10", "1_0", "1" * 5000,
           "\u00b2", "\u0663", "\u00e9", "\ud800", "\x1b[31m", "a\nb", "\x00", "a" * 300, "a.b", "../x", "'", "{", "!", [],
           {}, [[]], [None], [1, "a"], {"a": 1}, {"": {}}, 64, 1e-320, int("9" * 4000), "../secret",
           "/etc/passwd", "vit_huge", "finished", "fp8", {"!": "tensor", "at": "x"}, {"!": "tuple", "items": 3}, [0] * 2000,
           reduce(lambda inner, _: [inner], range(190), 1), reduce(lambda inner, _: {"a": inner}, range(190), 1)]  # fmt: skip
PIECES = [b"", b"\x00", b"\xff", b"\xc3", b"\x1b", b"\n", b" ", b":", b": ", b"- ", b"{", b"}", b"[", b"]", b",", b'"',
          b"'", b"&a ", b"*a", b"<<: ", b"!!int ", b"!!binary ", b"!!timestamp ", b"!!set ", b"!!omap ", b"!!bool ", b"%",
          b"---\n", b"|\n", b"#", b"0x", b"1:1", b"\xef\xbb\xbf", b"\\u0000", b"\\ud800", b"NaN", b"9" * 5000, b"[" * 50,
          b"2026-99-99", b"?", b"@", b"=", b"~", b"\t", b"\r"]  # fmt: skip
strange = st.one_of(
    st.sampled_from(STRANGE), st.text(max_size=5), st.integers(-(2**70), 2**70), st.floats(), st.booleans()
)


def places(value):
    """(container, key) of everything inside a value."""
    found = []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        found += [(value, key), *places(each)]
    return found


@st.composite
def changed(draw, valid, most=3):
    """One of the `valid` values with up to `most` places replaced, removed, renamed, wrapped or swapped."""
    value = [copy.deepcopy(draw(st.sampled_from(valid)))]
    for _ in range(draw(st.integers(0, most))):
        there = places(value)
        if not there:  # the whole value was removed
            return draw(strange)
        container, key = draw(st.sampled_from(there))
        how = draw(st.sampled_from(["replace", "replace", "remove", "rename", "list", "dict", "swap", "add"]))
        if how == "replace":
            container[key] = copy.deepcopy(draw(strange))
        elif how == "remove":
            del container[key]
        elif how == "rename" and isinstance(container, dict):
            container[draw(st.one_of(st.text(max_size=8), st.just(f"{key}s")))] = container.pop(key)
        elif how == "list":
            container[key] = [container[key]] * draw(st.integers(1, 3))
        elif how == "dict":
            container[key] = {str(key): container[key]}
        elif how == "swap":
            other, at = draw(st.sampled_from(there))
            container[key] = copy.deepcopy(other[at])
        elif isinstance(container, dict):
            container[draw(st.text(max_size=8))] = copy.deepcopy(draw(strange))
    return value[0] if value else draw(strange)


@st.composite
def damaged(draw, texts, most=3):
    """The bytes that `texts` draws, with up to `most` pieces of them cut out, repeated or put in."""
    content = draw(texts)
    for _ in range(draw(st.integers(0, most))):
        at, end = (draw(st.integers(0, len(content))) for _ in range(2))
        piece = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=4), st.just(content[at:end])))
        content = content[:at] + piece + content[draw(st.sampled_from([at, at + 1, max(at, end)])) :]
    return content
