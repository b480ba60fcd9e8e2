"""Colours of the page's figures, told apart by the colour-blind.

From the set of Okabe and Ito (Color Universal Design, 2008), darker or lighter where their contrast with the page's
ground was below 3:1 (WCAG 2.1, 1.4.11). Figures name the colours of a light ground; on a dark one page.js puts the
others of DARK in their place. What colours tell, labels, dashes or symbols tell as well.
"""

BLUE = "#0072b2"
VERMILION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#aa4a8c"
OCHRE = "#9c7a00"
GREY = "#7a8087"

DARK = {
    BLUE: "#56b4e9",
    VERMILION: "#ff8a47",
    GREEN: "#2cc79a",
    PURPLE: "#e08fc4",
    OCHRE: "#e0b84a",
    GREY: "#9aa1a9",
}

# For several servers in one figure, with the dashes and symbols that belong to them.
SERIES = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")

LIMIT = PURPLE


def line_of(place: int) -> dict[str, str | float]:
    """How the line of a server looks, by its place among the others."""
    return {"color": SERIES[place % len(SERIES)], "dash": DASHES[place % len(DASHES)], "width": 2.5}


def translucent(colour: str, share: float) -> str:
    """A colour for areas, that grid and lines shine through."""
    return f"{colour}{round(255 * share):02x}"
