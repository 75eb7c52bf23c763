"""A report's page as tests read it, and hostile text that must not break it."""

import re
from html.parser import HTMLParser

NASTY = "<script>alert(1)</script>|`x`\n# **b** [l](u) \u202eevil\u2066 \ud800 $x$ 中文 &amp; \"'"


class Page(HTMLParser):
    """The elements, ids and texts of a page; fails if tags are left open or closed twice."""

    VOID = ("meta", "br", "path", "use")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.labels, self.text = [], [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href"):
                self.links.append(value)
            if name == "aria-label":
                self.labels.append(value)
            assert not name.startswith("on")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page_of(folder):
    """A report's page; its ids must be unique and its inner links must lead somewhere."""
    page = Page((folder / "index.html").read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    return page


def harmless(folder, summary):
    """Check that hostile names do no harm; returns the page, the summary and the tables."""
    page = page_of(folder)
    assert not {"script", "b"} & set(page.tags)
    tables = [path.read_text(encoding="utf-8") for path in (folder / "tables").iterdir()]
    for part in (page.text, "".join(page.labels)):  # text, and what stands in attributes
        assert "<script>alert(1)</script>|" in part
        assert "&amp; \"'" in part
    assert "alert(1)" in "".join(tables)
    shown = [(folder / "index.html").read_text(encoding="utf-8"), summary, *tables]
    assert not re.search("[\u202e\u2066\ud800]", "".join(shown))
    return shown
