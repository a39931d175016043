"""Dates as people write them, each with the one ISO 8601 date that it means: a small translation task that needs no download.

No text means two dates, because three conventions settle what people leave open: two digits of a year mean 1950 to 2049,
numbers between dots are day, month, year, and numbers between slashes are month, day, year.
"""

import random
from collections.abc import Callable
from datetime import date, timedelta

FIRST_DAY, LAST_DAY = date(1950, 1, 1), date(2049, 12, 31)  # 100 years, so that two digits of a year name one of them
NUM_TRAIN, NUM_EVAL = 20_000, 1_000

# Written out here: strftime would follow the machine's locale.
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

STYLES: tuple[Callable[[date], str], ...] = (
    lambda day: f"{_ordinal(day)} of {_month(day)} {day.year}",  # 3rd of March 1997
    lambda day: f"the {_ordinal(day)} of {_month(day)}, {day.year}",  # the 3rd of March, 1997
    lambda day: f"{_month(day)} {day.day}, {day.year}",  # March 3, 1997
    lambda day: f"{_month(day)} {_ordinal(day)}, {day.year}",  # March 3rd, 1997
    lambda day: f"{_month(day)[:3]} {day.day}, {_short_year(day)}",  # Mar 3, 97
    lambda day: f"{_month(day)[:3]} {day.day} {day.year}",  # Mar 3 1997
    lambda day: f"{day.day} {_month(day)[:3]} {day.year}",  # 3 Mar 1997
    lambda day: f"{day.day} {_month(day).lower()} '{_short_year(day)}",  # 3 march '97
    lambda day: f"{day.day}. {_month(day)} {day.year}",  # 3. March 1997
    lambda day: f"{WEEKDAYS[day.weekday()]}, {day.day} {_month(day)} {day.year}",  # Monday, 3 March 1997
    lambda day: f"{WEEKDAYS[day.weekday()][:3]} {_month(day)[:3]} {day.day} {day.year}",  # Mon Mar 3 1997
    lambda day: f"{day.day:02d}-{_month(day)[:3].upper()}-{_short_year(day)}",  # 03-MAR-97
    lambda day: f"{day.day}.{day.month}.{day.year}",  # 3.3.1997: day first
    lambda day: f"{day.month}/{day.day}/{day.year}",  # 3/3/1997: month first
)


def date_pairs(seed: int = 1997) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return pairs to train on and pairs to evaluate on, (text, ISO date), the same for the same seed on every machine.

    Every day occurs at most once, in one style, so no day that is evaluated on is trained on.

    Returns:
        ``NUM_TRAIN`` and ``NUM_EVAL`` pairs in random order.
    """
    # A generator of its own: the data must be the same whatever the run's seed is.
    draw = random.Random(seed)
    offsets = draw.sample(range((LAST_DAY - FIRST_DAY).days + 1), NUM_TRAIN + NUM_EVAL)
    days = [FIRST_DAY + timedelta(days=offset) for offset in offsets]
    pairs = [(draw.choice(STYLES)(day), day.isoformat()) for day in days]
    return pairs[:NUM_TRAIN], pairs[NUM_TRAIN:]


def _month(day: date) -> str:
    return MONTHS[day.month - 1]


def _short_year(day: date) -> str:
    return f"{day.year % 100:02d}"


def _ordinal(day: date) -> str:
    # 11th, 12th and 13th, not 11st, 12nd and 13rd.
    ending = "th" if day.day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return f"{day.day}{ending}"
