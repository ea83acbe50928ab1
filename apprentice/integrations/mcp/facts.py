"""What a right final answer must contain: the most telling values of the last result, and how to find them in an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from ...core.records import JsonObject
from .kinds import Shape, words_of
from .masks import ISO, path_text
from .redaction import MARK
from .spec import WORKDIR
from .values import Path, at, canonical, leaves_of, parsed

MOST_FACTS = 4
LONGEST_FACT = 80
_WANTED = {"target", "to", "result", "output", "value", "answer", "converted", "total", "sum", "count", "size", "temperature", "price"}
_GIVEN = {"source", "from", "input", "request", "original"}
_TITLES = {"name", "title", "path"}
DULL = {"id", "cid", "type", "pk", "notnull", "kind", "status", "permissions", "rowid", "isfile", "isdirectory", "version", "mime"}
_NO_NUMBER_BEFORE = r"(?<!\d:)(?<!^-)(?<![^\w]-)"
_NO_NUMBER_AFTER = r"(?!:\d)"
_MARKED = re.compile(r"^\[(?:FILE|DIR)\] (.+?)(?:\s{2,}(.*))?$")
_NOTHING = re.compile(
    r"(?:no|none|nothing|0)\b.*\b(?:found|match\w*|results?|files?|director\w+|folders?|items?|entries|rows?|records?|yet|exists?)\b.*"
    r"|0 ?b(?:ytes)?",
    re.IGNORECASE,
)
"""How a server says that there is nothing; nobody has to tell it in these words."""


@dataclass(frozen=True, slots=True)
class Fact:
    """`path` leads to it in the result of call `call`; `form` says which part of it (`time`, `date`, or all). `live`: it moves."""

    call: int
    path: Path
    form: str
    text: str
    live: bool = False

    def dump(self) -> JsonObject:
        return {"call": self.call, "path": list(self.path), "form": self.form}


def facts_of(
    shape: Shape,
    index: int,
    arguments: JsonObject,
    result: str,
    earlier: Sequence[JsonObject],
    volatile: Sequence[str],
    asked: str = "",
) -> list[Fact]:
    """The facts in the result of one call. Values that were given to it are none; [] if nothing short enough stands out, or if
    what was asked for stands in the request already. `asked`: the name of the value that the request asks for, if it names one."""
    value = parsed(result)
    own = {str(leaf).strip().lower() for _, leaf in leaves_of(arguments)}
    before = {str(leaf).strip().lower() for call in earlier for _, leaf in leaves_of(call)}
    if isinstance(value, str) and asked:
        return []
    if isinstance(value, str):
        sized = bool({"size", "sizes"} & set(shape.object.split()))
        return [Fact(index, ("[line]", line), "", text) for line, text in _in_text(value, own, sized)] if not volatile else []
    groups: dict[Path, list[Fact]] = {}
    for path, leaf in leaves_of(value):
        fact = _fact(shape, index, path, leaf, volatile)
        names = [part for part in path if not part.startswith("[")]
        if asked and words_of(asked) != (words_of(names[-1]) if names else []):
            continue
        if fact is not None:
            general = tuple("[]" if part.startswith("[") else part for part in path)
            groups.setdefault(general, []).append(fact)
    best: tuple[float, list[Fact]] = (0.0, [])
    most = 0.0
    trivial = False
    for path, found in groups.items():
        texts = {fact.text.lower() for fact in found}
        if len(texts) > MOST_FACTS:
            continue
        worth = _score(shape, path)
        if worth > most:
            most, trivial = worth, bool(texts & own) and bool(_asked(path))
        score = worth - 8 * bool(texts & own or any(_within(text, own) for text in texts)) - bool(texts & before)
        if score > best[0]:
            best = (score, list({fact.text: fact for fact in found}.values()))
    return [] if trivial else best[1]


def _asked(path: Path) -> set[str]:
    return {word for part in path if not part.startswith("[") for word in words_of(part)} & _WANTED


def _within(text: str, given: set[str]) -> bool:
    """Whether it is an argument with something around it."""
    return any(len(value) > 3 and value in text for value in given)


def _fact(shape: Shape, index: int, path: Path, value: JsonValue, volatile: Sequence[str]) -> Fact | None:
    if isinstance(value, bool) or value is None or value == "" or (isinstance(value, str) and (len(value) > LONGEST_FACT or "\n" in value)):
        return None
    if isinstance(value, str) and (MARK in value or _NOTHING.fullmatch(value)):
        return None
    form = ""
    match = ISO.fullmatch(value) if isinstance(value, str) else None
    if match:
        about_time = {"time", "now", "clock"} & set(shape.object.split()) or any(leaf.kind in ("time", "timezone") for leaf in shape.leaves)
        form = "time" if match[2] and about_time else "date"
    where = path_text(path)
    moves = where in volatile or (f"{where} date" in volatile and form != "time")
    return Fact(index, path, form, shaped(value, form).removeprefix(f"{WORKDIR}/"), live=moves)


def shaped(leaf: JsonValue, form: str) -> str:
    """The part of a value that is the fact."""
    match = ISO.search(str(leaf)) if form else None
    if match:
        return str(match[2]) if form == "time" and match[2] else match[1]
    return str(leaf)


def _score(shape: Shape, path: Path) -> float:
    names = [part for part in path if not part.startswith("[")]
    words = {word for name in names for word in words_of(name)}
    last = names[-1].lower() if names else ""
    about = set(shape.object.split()) | {word for leaf in shape.leaves for word in leaf.label.split()}
    score = 2.0 + 3 * bool(words & _WANTED) - 3 * bool(words & _GIVEN) - 3 * (last in DULL or last == "timezone")
    score += 1.5 * bool(set(words_of(last)) & _TITLES) + 2 * any(word in last and word != last for word in about if len(word) > 3)
    return score + 0.5 * (last in ("observations", "content", "text")) + 2 * (last == "observations" or path[-1:] == ("[]",))


def _in_text(text: str, own: set[str], sized: bool) -> list[tuple[str, str]]:
    """`sized`: the sizes of files are asked for, not only their names."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and MARK not in line]
    found = [match for line in lines if (match := _MARKED.match(line))]
    if found:
        sizes = {match[2]: None for match in found if match[2]} if sized else {}
        marked = [*sizes] or [match[1] for match in found]
        return [("", name) for name in marked] if len(found) <= MOST_FACTS else []
    lines = [line for line in lines if not _NOTHING.fullmatch(line)]
    if len(lines) == 1 and len(lines[0]) <= LONGEST_FACT:
        numbers = [n for n in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])", lines[0]) if canonical(n) not in {canonical(v) for v in own}]
        if len(numbers) == 1 and any(value in lines[0] for value in own):
            return [("", numbers[0])]
        if any(len(value) > 8 and value in lines[0].lower() for value in own):
            return []  # it only gives back what it was given
        return [("", lines[0].removeprefix(f"{WORKDIR}/").strip("'\""))]
    lines = [line for line in lines if not line.endswith(":") and line != WORKDIR and re.search(r"\w", line)]
    return [("", line) for line in lines] if 0 < len(lines) <= MOST_FACTS and max(map(len, lines)) <= LONGEST_FACT else []


def live_text(fact: Mapping[str, JsonValue], result: str) -> str | None:
    """A fact read anew from a result; None if it is not there."""
    path, form = fact.get("path"), fact.get("form")
    if not isinstance(path, list):
        return None
    leaf = at(parsed(result), tuple(str(part) for part in path))
    return None if leaf is None or isinstance(leaf, dict | list) else shaped(leaf, str(form or ""))


def told(fact: str, answer: str) -> bool:
    """Whether an answer says a fact: commas in numbers, quotes, case and the 12-hour clock make no difference. A number is no
    part of a time, and has its sign."""
    spoken, wanted = _spoken(answer), _spoken(fact)
    before, after = (_NO_NUMBER_BEFORE, _NO_NUMBER_AFTER) if re.fullmatch(r"-?\d+(?:\.\d+)?(?: \w+)?", wanted) else ("", "")
    return any(re.search(rf"(?<![\w.]){before}{re.escape(form)}(?![\w]|\.\d){after}", spoken) for form in _forms(wanted) if form)


def _spoken(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text.lower())
    text = re.sub(r"[\"'`“”‘’*]", "", text).replace("−", "-")
    text = re.sub(r"(\d{1,2})(?::(\d{2}))?\s*([ap])\.?m\b\.?", _to_24, text)
    return " ".join(text.split()).strip(" .") if len(text) < 100_000 else text


def _to_24(match: re.Match[str]) -> str:
    hour = int(match[1]) % 12 + (12 if match[3] == "p" else 0)
    return f"{hour:02d}:{match[2] or '00'}"


def _forms(fact: str) -> list[str]:
    if re.fullmatch(r"0\d:\d{2}", fact):
        return [fact, fact[1:]]
    if re.fullmatch(r"-?\d+\.0+", fact):
        return [fact, fact.split(".")[0]]
    if re.fullmatch(r"-?\d+", fact):
        return [fact, f"{fact}.0"]
    if size := re.fullmatch(r"(\d+(?:\.\d+)?) ?(b|[kmgt]i?b)", fact):
        return [f"{size[1]}{between}{unit}" for between in ("", " ") for unit in (size[2], *({"b": ("bytes", "byte")}.get(size[2], ())))]
    return [fact]
