"""Failures that a server reports as success: recognised by how a failure begins or ends, never by the word inside a text.

A text that is long, or a log, or mentions an error in passing, is a result. Where both readings are possible (a file whose
whole text is `Error: disk full`) it counts as a failure: that is what a person would take it for.
"""

from __future__ import annotations

import json
import re

from pydantic import JsonValue

LONGEST = 2_000
"""A plain failure is shorter than this."""
LONGEST_LINE = 300

_LEAD = re.compile(r"^[\s\W_]+")
"""Emoji, markdown and brackets in front of the first word."""
_CROSS = re.compile(r"^\s*[❌✗✘✖🚫⛔]")
_TAG = re.compile(r"^\W*[\[(<*](?:error|failed|failure)[\])>*]", re.IGNORECASE)
_LABEL = re.compile(
    r"^(?:fatal |unexpected |unknown |an? )?(?:[a-z]+ )?(?:error|exception)(?:\s*(?:\(.{1,40}\)|\[.{1,40}\]|code \S+|\d{3}))?"
    r"\W*(?::(?!\s*[-+]?\d[\d.,%e+-]*\s*$)|!|\s[-–—]\s|$)"  # a number behind the colon makes it a measure
    r"|^(?:mcp|http|sql|api|json|io|os)[ -]error\b"
    r"|^(?:failed|failure)(?::|\s[-–—]\s|!|$)"
    r"|^error (?:in|while|when|during|with|from|at|occurred)\b"
    r"|^error (?!handling|reporting|logging|tracking|checking|correcting|bars?)\w+ing\b"
    r"|^traceback \(most recent call last\)"
    r"|^an? (?:\w+ )?(?:error|exception) (?:has )?occurr?ed\b",
    re.IGNORECASE,
)
_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b\s*(?::|$)")
_LINE = re.compile(
    r"^(?:access|permission|authorization|request) (?:denied|refused)\b"
    r"|^security violation\b"
    r"|^(?:unauthorized|forbidden|bad request|internal server error|not implemented|permission denied)\b(?:\W|$)"
    r"|^(?:http )?[45]\d\d (?:not found|forbidden|unauthorized|bad request|internal server error|too many requests|bad gateway)\b"
    r"|^(?:failed to|unable to|could not|couldn't|cannot|can't) \w+"
    r"|^(?:invalid|unknown|unsupported|unrecognized|malformed|illegal) (?:[\w'\"-]+ ){0,2}?"
    r"(?:tool|function|argument|parameter|input|path|name|id"
    r"|identifier|key|type|format|date|time|timezone|zone|url|uri|query|syntax|expression|command|operation|operator|option|request|token"
    r"|column|table|file|directory|location|user|value|json|arguments|parameters)\b(?:\W|$)"
    r"|^missing (?:required|mandatory) \w+"
    r"|^no such \w+"
    r"|^enoent\b|^eacces\b|^eperm\b"
    r"|^only \w+ (?:queries|statements) are allowed\b"
    r"|\b(?:does not exist|doesn't exist|do not exist|no longer exists|(?<!if )not found|could not be found)[\s\"'`.!)]*$"
    r"|\b(?:does not exist|doesn't exist|not found)(?:: | in (?:the )?\S+[.!]?$)",
    re.IGNORECASE,
)
_LOG = re.compile(r"^\W*(?:\d{2,4}[-/:]\S+ .{0,20})?(?:debug|info|warn(?:ing)?|error|fatal|trace|critical)\b", re.IGNORECASE | re.MULTILINE)
_NOTHING = {"", "none", "null", "no", "false", "n/a", "na", "0", "ok"}


def reported_failure(text: str, structured: JsonValue = None) -> bool:
    """Whether a result that was flagged as success is a plain failure all the same."""
    return _failing_value(structured) or _failing_text(text)


def _failing_text(text: str) -> bool:
    text = text.strip()
    if not text or len(text) > LONGEST:
        return False
    if text[0] in "{[":
        try:
            return _failing_value(json.loads(text))
        except (ValueError, RecursionError):
            pass
    if _CROSS.match(text):
        return True
    lines = text.splitlines()
    first = _LEAD.sub("", lines[0])
    if (_TAG.match(lines[0]) or _LABEL.search(first) or _EXCEPTION.search(first)) and len(_LOG.findall(text)) < 2:
        return True
    return len(lines) == 1 and len(text) <= LONGEST_LINE and bool(_LINE.search(first))


def _failing_value(value: JsonValue) -> bool:
    """A JSON object that names an error, or a list of nothing but such objects."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, dict) and _failing_value(item) for item in value)
    if not isinstance(value, dict):
        return False
    flags = [value[key] for key in ("success", "ok", "succeeded") if isinstance(value.get(key), bool)]
    if flags:
        return not all(flags)
    if value.get("isError") is True:
        return True
    if _says_something(value.get("error")):
        return True
    errors = value.get("errors")
    return isinstance(errors, list) and bool(errors) and not value.get("data") and len(value) <= 3


def _says_something(error: JsonValue) -> bool:
    """Numbers are measures ("error": 0.02), not messages."""
    if isinstance(error, str):
        return error.strip().lower() not in _NOTHING
    return error is True or (isinstance(error, dict | list) and bool(error))
