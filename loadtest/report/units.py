"""How numbers are written for people: three digits and a unit, the same in text, Markdown and the page."""

import math


def format_seconds(value: float) -> str:
    """Three digits and a unit."""
    for factor, unit in ((1000, "ms"), (1, "s")):
        scaled = value * factor
        if scaled < 9.995:
            return f"{scaled:.2f} {unit}"
        if scaled < 99.95:
            return f"{scaled:.1f} {unit}"
        if scaled < 999.5:
            return f"{scaled:.0f} {unit}"
    return f"{value:.0f} s"


def format_share(value: float) -> str:
    return f"{100 * value:.1f} %"


def format_rate(value: float) -> str:
    """A rate a second: 0.6, 12.5, 1,250."""
    if math.isinf(value):
        return "inf"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def format_rates(low: float, high: float) -> str:
    """An interval of rates, 0 and infinity being the ends that nothing bounds."""
    if math.isinf(high):
        return f"{format_rate(low)} and more" if low > 0 else "not known"
    return f"{format_rate(low)} to {format_rate(high)}" if low > 0 else f"up to {format_rate(high)}"


def format_count(value: int) -> str:
    return f"{value:,}"


def format_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
