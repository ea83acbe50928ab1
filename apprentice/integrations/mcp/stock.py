"""Plausible values for kinds of parameters: words, names, sentences, dates, time zones, small tables. Invented here or taken from the
standard library; what a server itself has is found by exploring.
"""

from __future__ import annotations

import random
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path

from .kinds import plural


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = words(
    "Alice Bruno Carla David Elena Felix Grace Hugo Irene Jonas Karin Liam Marta Nils Olga Pavel Quinn Rosa Simon Tanja "
    "Umar Vera Walter Xenia Yusuf Zoe Amir Bianca Cedric Daria Emil Farah Gustav Hanna Igor Julia Kofi Lena Milan Nadia "
    "Oscar Paula Rafael Sofia Tomas Ursula Victor Wanda Yara Zlata Aldo Birgit Chen Dolores Edgar Frieda"
)
LAST_NAMES = words(
    "Adler Berger Costa Dietrich Eriksen Fischer Garcia Hansen Ivanov Jensen Keller Lopez Moreau Novak Okafor Petrov Quist "
    "Rossi Schmidt Tanaka Ueda Vogel Weber Yilmaz Zeller Bakker Conti Duarte Esposito Fontaine Greco Horvat"
)
COMPANY_STEMS = words(
    "Acme Northwind Bluebird Copperfield Driftwood Evergreen Fernhill Granite Harbor Ironwood Juniper Kestrel Lakeside "
    "Meadow Nimbus Oakridge Pinecone Quartz Redwood Silverline Tidewater Umbra Violet Willow Zephyr"
)
COMPANY_ENDS = ("Labs", "Foods", "Robotics", "Travel", "Books", "Energy", "Music", "Logistics")
CITIES = words(
    "Lisbon Oslo Kyoto Nairobi Toronto Valencia Prague Dublin Hanoi Cairo Lima Bergen Geneva Krakow Turin Ghent Bogota "
    "Dakar Perth Auckland Leipzig Porto Seville Tallinn Zagreb Athens Boston Denver Austin Montreal Mumbai Seoul Osaka "
    "Manila Quito Riga Basel"
)
NOUNS = words(
    "garden budget invoice kitchen bicycle printer concert library passport ticket server contract picnic heater camera "
    "piano roof engine balcony newsletter workshop package calendar window fence laptop bridge cellar lantern orchard "
    "harbor museum parcel recipe sofa station suitcase theater tractor vase wallet wardrobe battery blanket candle carpet "
    "chimney compass curtain drawer faucet"
)
ADJECTIVES = words(
    "old new green quiet broken spare small large yellow wooden heavy narrow bright rusty winter summer northern southern "
    "early late round square cheap precious warm cold dusty clean hidden open"
)
TASKS = words(
    "repair order clean paint sell move check photograph measure replace insure rent polish label return collect sketch inspect lock open"
)
HOBBIES = words(
    "chess tennis painting sailing baking photography gardening climbing pottery cycling singing fencing astronomy hiking "
    "knitting judo archery surfing skiing dancing carpentry origami rowing drumming"
)
DRINKS = words("tea coffee cocoa lemonade cider milk water juice")
CATEGORIES = words("person company project city product event team recipe device animal course museum")
RELATIONS = words("knows supports visits follows needs trusts helps advises")
LANGUAGES = words("English German French Spanish Italian Dutch Polish Turkish Swedish Greek Finnish Japanese Korean")
COUNTRIES = words("Norway Portugal Japan Kenya Canada Peru Vietnam Ireland Croatia Greece Chile Egypt India Finland Poland")
CURRENCIES = words("USD EUR GBP JPY CHF CAD AUD SEK NOK DKK PLN CZK HUF INR BRL ZAR MXN NZD SGD KRW")
COLORS = words("red blue green yellow purple orange brown black white gray pink teal")
ENDINGS = ("txt", "md", "txt", "csv", "log")

BIG_CITIES = frozenset(
    [
        "Tokyo",
        "Seoul",
        "Shanghai",
        "Singapore",
        "Manila",
        "Jakarta",
        "Bangkok",
        "Dubai",
        "Karachi",
        "Tehran",
        "Baghdad",
        "Riyadh",
        "Kabul",
        "Dhaka",
        "Kathmandu",
        "Colombo",
        "Taipei",
        "Hong_Kong",
        "Jerusalem",
        "Beirut",
        "Damascus",
        "Yerevan",
        "Baku",
        "Tashkent",
        "London",
        "Paris",
        "Berlin",
        "Madrid",
        "Rome",
        "Vienna",
        "Prague",
        "Budapest",
        "Warsaw",
        "Athens",
        "Lisbon",
        "Dublin",
        "Oslo",
        "Stockholm",
        "Helsinki",
        "Copenhagen",
        "Amsterdam",
        "Brussels",
        "Zurich",
        "Moscow",
        "Istanbul",
        "Bucharest",
        "Sofia",
        "Belgrade",
        "Zagreb",
        "Vilnius",
        "Riga",
        "Tallinn",
        "Luxembourg",
        "Monaco",
        "Malta",
        "New_York",
        "Chicago",
        "Denver",
        "Los_Angeles",
        "Toronto",
        "Vancouver",
        "Mexico_City",
        "Havana",
        "Panama",
        "Bogota",
        "Lima",
        "Caracas",
        "Santiago",
        "Sao_Paulo",
        "Montevideo",
        "Cairo",
        "Lagos",
        "Nairobi",
        "Johannesburg",
        "Casablanca",
        "Algiers",
        "Tunis",
        "Tripoli",
        "Accra",
        "Dakar",
        "Khartoum",
        "Sydney",
        "Melbourne",
        "Brisbane",
        "Perth",
        "Adelaide",
        "Darwin",
        "Auckland",
        "Honolulu",
        "Reykjavik",
        "Phoenix",
        "Detroit",
        "Anchorage",
        "Halifax",
        "Winnipeg",
        "Edmonton",
    ]
)


@dataclass(frozen=True, slots=True)
class Table:
    """A small table: its name, a text column and a number column."""

    name: str
    text: str
    number: str


_FAMILIES: dict[str, str] = {
    "title": "books:pages songs:seconds recipes:minutes movies:year courses:hours games:levels tasks:priority",
    "name": "employees:salary planets:moons pets:age plants:height teams:points lakes:depth rivers:length",
    "customer": "orders:amount invoices:total parcels:weight deliveries:boxes repairs:days bookings:nights refunds:cents",
    "owner": "farms:cows orchards:trees kitchens:ovens boats:sails stables:horses garages:vans gardens:benches",
    "model": "cars:speed bikes:gears lamps:watts phones:storage printers:copies chairs:legs radios:channels",
    "artist": "paintings:euros albums:tracks statues:tons drawings:inches murals:meters posters:prints portraits:sittings",
    "author": "poems:lines novels:chapters plays:acts essays:sentences letters:sheets diaries:entries fables:animals",
    "place": "hotels:beds museums:visitors schools:pupils theaters:seats stations:platforms castles:towers islands:villages",
    "leader": "clubs:members bands:concerts tours:stops crews:sailors choirs:singers committees:votes troops:tents",
    "winner": "races:laps tournaments:rounds contests:judges matches:goals regattas:yachts rallies:stages quizzes:questions",
}
TABLES = tuple(Table(name, text, number) for text, names in _FAMILIES.items() for name, number in (t.split(":") for t in names.split()))
TABLE_FAMILIES = tuple(
    (text, *(part for table in TABLES if table.text == text for part in (table.name, table.number))) for text in _FAMILIES
)
"""Tables with the same text column, each with its columns: no two families have a name in common."""


def person(r: random.Random) -> str:
    return f"{r.choice(FIRST_NAMES)} {r.choice(LAST_NAMES)}"


def company(r: random.Random) -> str:
    return f"{r.choice(COMPANY_STEMS)} {r.choice(COMPANY_ENDS)}"


def named(r: random.Random) -> str:
    return r.choice((person, company, _label, person))(r)


def _label(r: random.Random) -> str:
    return f"{r.choice(ADJECTIVES)} {r.choice(NOUNS)}".title()


def errand(r: random.Random) -> str:
    return f"{r.choice(TASKS)} the {r.choice(ADJECTIVES)} {r.choice(NOUNS)}"


def key(r: random.Random) -> str:
    """What a person would keep a value under."""
    return r.choice((lambda: r.choice(NOUNS), lambda: f"{r.choice(ADJECTIVES)}_{r.choice(NOUNS)}"))()


def sentence(r: random.Random) -> str:
    """A short thing that a person would note down; no quotes, no final stop."""
    noun = f"{r.choice(ADJECTIVES)} {r.choice(NOUNS)}"
    return r.choice(
        (
            lambda: f"{r.choice(TASKS)} the {noun}",
            lambda: f"{r.choice(TASKS)} the {noun} before {r.choice(('Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday'))}",
            lambda: f"the {noun} costs {r.randrange(11, 990)} euros",
            lambda: f"{r.choice(FIRST_NAMES)} has the {noun}",
            lambda: f"the {noun} is in {r.choice(CITIES)}",
        )
    )()


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def fact(r: random.Random) -> str:
    """A short thing to know about somebody."""
    return r.choice(
        (
            lambda: f"likes {r.choice(HOBBIES)}",
            lambda: f"drinks {r.choice(DRINKS)} at {r.randrange(6, 23)}:{r.choice(('00', '15', '30', '45'))}",
            lambda: f"lives in {r.choice(CITIES)}",
            lambda: f"owns {_a(r.choice(ADJECTIVES))} {r.choice(NOUNS)}",
            lambda: f"teaches {r.choice(HOBBIES)} in {r.choice(CITIES)}",
        )
    )()


def thing_fact(r: random.Random) -> str:
    """A short thing to know about anything."""
    return r.choice(
        (
            lambda: f"is in {r.choice(CITIES)}",
            lambda: f"costs {r.randrange(11, 990)} euros",
            lambda: f"opens at {r.randrange(6, 12)}:{r.choice(('00', '15', '30', '45'))}",
            lambda: f"started in {r.randrange(1950, 2025)}",
            lambda: f"needs {_a(r.choice(ADJECTIVES))} {r.choice(NOUNS)}",
        )
    )()


def word(r: random.Random) -> str:
    return r.choice((*NOUNS, *HOBBIES))


def folder(r: random.Random) -> str:
    return r.choice((lambda: plural(r.choice(NOUNS)), lambda: f"{r.choice(ADJECTIVES)}-{plural(r.choice(NOUNS))}"))()


def file_name(r: random.Random) -> str:
    stem = r.choice(
        (
            lambda: r.choice(NOUNS),
            lambda: f"{r.choice(ADJECTIVES)}-{r.choice(NOUNS)}",
            lambda: f"{r.choice(NOUNS)}-{r.choice(CITIES).lower()}",
        )
    )()
    return f"{stem}.{r.choice(ENDINGS)}"


def clock(r: random.Random) -> str:
    return f"{r.randrange(24):02d}:{r.randrange(60):02d}"


def day(r: random.Random) -> str:
    return (date(2020, 1, 1) + timedelta(days=r.randrange(3650))).isoformat()


def expression(r: random.Random) -> str:
    a, b, c = r.randrange(2, 99), r.randrange(2, 99), r.randrange(2, 20)
    return r.choice((f"{a} + {b}", f"{a} * {b}", f"{a + b} - {a}", f"{a} + {b} * {c}", f"({a} + {b}) * {c}", f"{a * c} / {c}"))


def number(r: random.Random) -> int:
    return r.randrange(2, 1000)


@lru_cache(maxsize=1)
def time_zones() -> tuple[str, ...]:
    """Zones named after places, without the old aliases where the system's list of them can be read."""
    regions = ("Africa/", "America/", "Asia/", "Atlantic/", "Australia/", "Europe/", "Indian/", "Pacific/")
    known = {name for name in zoneinfo.available_timezones() if name.startswith(regions)}
    listed: set[str] = set()
    for place in zoneinfo.TZPATH:
        for table in ("zone.tab", "zone1970.tab"):
            path = Path(place) / table
            if path.is_file():
                lines = path.read_text(encoding="utf-8").splitlines()
                listed |= {line.split("\t")[2] for line in lines if line and not line.startswith("#") and line.count("\t") >= 2}
    return tuple(sorted(known & listed or known))


def city_of(zone: str) -> str | None:
    """The city that a zone is named after, if everybody knows where it is."""
    region, _, city = zone.partition("/")
    return city.replace("_", " ") if region and city in BIG_CITIES else None


SMALL_STOCKS = (RELATIONS, CATEGORIES, LANGUAGES, COUNTRIES, CURRENCIES, COLORS)
"""So small that both parts must be given some of them."""
Maker = Callable[[random.Random], str]
MAKERS: dict[str, Maker] = {
    "timezone": lambda r: r.choice(time_zones()),
    "time": clock,
    "date": day,
    "datetime": lambda r: f"{day(r)}T{clock(r)}:00",
    "url": lambda r: f"https://example.com/{r.choice(NOUNS)}/{r.randrange(1, 500)}",
    "email": lambda r: f"{r.choice(FIRST_NAMES).lower()}.{r.choice(LAST_NAMES).lower()}@example.com",
    "path": lambda r: file_name(r) if r.random() < 0.7 else f"{folder(r)}/{file_name(r)}",
    "new path": file_name,
    "folder": folder,
    "glob": lambda r: f"*{r.choice(NOUNS)}*",
    "expression": expression,
    "table": lambda r: r.choice(TABLES).name,
    "currency": lambda r: r.choice(CURRENCIES),
    "language": lambda r: r.choice(LANGUAGES),
    "country": lambda r: r.choice(COUNTRIES),
    "city": lambda r: r.choice(CITIES),
    "color": lambda r: r.choice(COLORS),
    "search": word,
    "relation": lambda r: r.choice(RELATIONS),
    "category": lambda r: r.choice(CATEGORIES),
    "key": key,
    "name": named,
    "title": _label,
    "errand": errand,
    "sentence": sentence,
    "fact": fact,
    "text": word,
}
