"""Formats numbers and durations for people."""

from __future__ import annotations


def count(number: float) -> str:
    """Return a whole number in groups of three digits: `1,234`."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """Return a number with a noun: `1 replica`, `2 replicas`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def significant(number: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits; whole numbers keep all theirs."""
    if number == 0:
        return "0"
    whole = len(f"{abs(number):.0f}") if abs(number) >= 1 else 0
    if whole:
        return f"{number:,.{max(digits - whole, 0)}f}"
    return f"{number:.{digits}g}"


def trimmed(number: float) -> str:
    """Return a number with at most three significant digits, without trailing zeros."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def percent(fraction: float) -> str:
    """Return a fraction in percent: `45%`."""
    return f"{100 * fraction:.0f}%"


def clock(seconds: float) -> str:
    """Return a duration as `m:ss` or `h:mm:ss`."""
    whole = max(int(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def duration(seconds: float) -> str:
    """Return a duration with units: `1.2 s`, `3 min 4 s`, `2 h 1 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
