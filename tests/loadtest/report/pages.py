"""A page taken apart, for tests of what stands on it."""

import html.parser
import json
import re

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)>&quot;'"""


class Elements(html.parser.HTMLParser):
    """The elements of a page with their attributes, and its scripts apart."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.words += data

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def figures_of(text: str) -> dict:
    """The figures that the page draws, as plotly gets them."""
    return json.loads(re.search(r"^const FIGURES = (.*);$", text, re.MULTILINE)[1])


def trace_names(figure: dict) -> set[str]:
    return {trace["name"] for trace in figure["data"] if "name" in trace}
