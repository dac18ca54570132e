"""What every view must hold to, checked by Python's own HTML parser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"br", "col", "wbr", "meta", "img", "link", "input", "hr"}
FORBIDDEN = {"script", "iframe", "object", "embed", "img", "link", "base", "form", "input", "foreignobject", "use", "image", "audio", "video", "animate", "set"}
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]")

ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "</title><svg onload=alert(1)>",
    "--><script>alert(1)</script>",
    "]]><script>",
    "javascript:alert(1)",
    "&lt;script&gt;&amp;",
    "\u202egnp.exe\u202c and \u2066x\u2069",
    "a\x00b\x1b[31mc\x7f\r\n\t",
    "\ud800 lone surrogate",
    "\U000e0041\U000e0042 tags",
    "zero\u200bwidth\ufeff",
    "e" + "\u0301" * 500,
    "<" * 2_000_000,
    "x" * 2_000_000,
    "\n" * 100_000,
    "{{7*7}} ${7*7} %s {0}",
    "",
]


class Page(HTMLParser):
    """Tags, attributes and text of a page; raises AssertionError on the first thing that must not be."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.styles: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert tag not in FORBIDDEN, tag
        assert "style" not in self.open, "an element inside a style"
        for name, value in attrs:
            assert re.fullmatch(r"[a-z][a-z0-9-]*", name), (tag, name)
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "xlink:href", "action", "formaction", "srcdoc"), (tag, name)
            assert name != "href" or (value or "").startswith("#"), value
            if name == "style":
                self.styles.append(value or "")
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        (self.styles if self.open and self.open[-1] == "style" else self.parts).append(data)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def count(self, tag: str, **attributes: str) -> int:
        return sum(1 for t, a in self.tags if t == tag and all(a.get(k.rstrip("_")) == v for k, v in attributes.items()))


def check(source: str, limit: int = 3_000_000) -> Page:
    """A view that is well formed, inert, free of the outside, and not longer than it may be."""
    assert len(source) < limit, len(source)
    assert not INVISIBLE.search(source), INVISIBLE.search(source)
    source.encode("utf-8")
    page = Page(source)
    css = " ".join(page.styles)
    assert "url(" not in css and "@import" not in css and "expression(" not in css and "<" not in css
    return page
