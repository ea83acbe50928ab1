"""Wordings by kind of call. A frame fits a call by the kinds of its arguments, its verb, and what it is about.

`{slots}` are filled with the arguments' values; `{object}`, `{objects}` and `{one}` with the tool's object. Each frame has a
multiple of three wordings: every third is for held-out scenarios only.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kinds import Verb


@dataclass(frozen=True, slots=True)
class Frame:
    """`asks` are whole sentences, `does` imperative clauses that can be joined. `about`: a pattern for the tool's object."""

    name: str
    slots: tuple[str, ...]
    asks: tuple[str, ...]
    does: tuple[str, ...] = ()
    verbs: tuple[Verb, ...] = ()
    about: str = ""
    asks_for: str = ""
    """The name of the value in the result that its questions ask for, where there may be others."""


FRAMES: tuple[Frame, ...] = (
    Frame(
        "time in a zone",
        ("timezone",),
        (
            "What time is it in {timezone}?",
            "What's the time in {timezone} right now?",
            "How late is it in {timezone}?",
            "Tell me the time in {timezone}.",
            "I need to know what time it is in {timezone}.",
            "Could you tell me the time in {timezone}?",
            "What is the local time in {timezone}?",
            "Which time is it now in {timezone}?",
            "Please check what time it is in {timezone}.",
        ),
        ("tell me what time it is in {timezone}", "check the time in {timezone}", "look up how late it is in {timezone}"),
        verbs=("get", "search", "other", "list"),
        about=r"\b(?:time|clock|now)\b",
    ),
    Frame(
        "time between zones",
        ("source timezone", "target timezone", "time"),
        (
            "What time is it in {target timezone} when it is {time} in {source timezone}?",
            "When it is {time} in {source timezone}, what time is it in {target timezone}?",
            "It is {time} in {source timezone}. What time is that in {target timezone}?",
            "If it's {time} in {source timezone}, how late is it in {target timezone}?",
            "Convert {time} in {source timezone} to the time in {target timezone}.",
            "I have a call at {time} in {source timezone}. What time is that in {target timezone}?",
            "A meeting starts at {time} in {source timezone}. When does it start in {target timezone}?",
            "{time} in {source timezone} is what time in {target timezone}?",
            "Tell me the time in {target timezone} when the clock in {source timezone} shows {time}.",
        ),
        (
            "work out what time it is in {target timezone} when it is {time} in {source timezone}",
            "tell me how late it is in {target timezone} at {time} in {source timezone}",
            "turn {time} in {source timezone} into the time in {target timezone}",
        ),
    ),
    Frame(
        "value between units",
        ("number", "source", "target"),
        (
            "How much is {number} {source} in {target}?",
            "Convert {number} {source} to {target}.",
            "What are {number} {source} in {target}?",
            "How many {target} are {number} {source}?",
            "Turn {number} {source} into {target}.",
            "I have {number} {source}. How much is that in {target}?",
        ),
        ("turn {number} {source} into {target}", "express {number} {source} in {target}", "say how much {number} {source} is in {target}"),
        verbs=("convert", "compute"),
    ),
    Frame(
        "expression",
        ("expression",),
        (
            "What is {expression}?",
            "How much is {expression}?",
            "Work out {expression}.",
            "I need the result of {expression}.",
            "Tell me what {expression} comes to.",
            "Please solve {expression}.",
        ),
        ("work out {expression}", "tell me what {expression} is", "find the result of {expression}"),
    ),
    Frame(
        "two numbers",
        ("number a", "number b"),
        (
            "What is the {object} of {number a} and {number b}?",
            "Tell me the {object} of {number a} and {number b}.",
            "I need the {object} of {number a} and {number b}.",
            "Please work out the {object} of {number a} and {number b}.",
            "Which number is the {object} of {number a} and {number b}?",
            "Can you give me the {object} of {number a} and {number b}?",
        ),
        (
            "work out the {object} of {number a} and {number b}",
            "tell me the {object} of {number a} and {number b}",
            "find the {object} of {number a} and {number b}",
        ),
        verbs=("get", "compute", "other"),
    ),
    Frame(
        "read a file",
        ("path",),
        (
            "What is in the file {path}?",
            "What does {path} say?",
            "Show me the contents of {path}.",
            "I'd like to know what is written in {path}.",
            "Open {path} and tell me what it says.",
            "Let me see the text of {path}.",
        ),
        ("tell me what {path} says", "show me the contents of {path}", "look into {path} and tell me what it says"),
        verbs=("get",),
        about=r"\bfiles?\b(?! info)",
    ),
    Frame(
        "first lines",
        ("path", "number head"),
        (
            "Show me the first {number head} lines of {path}.",
            "What do the first {number head} lines of {path} say?",
            "I only need the first {number head} lines of {path}.",
        ),
        (
            "show me the first {number head} lines of {path}",
            "tell me the first {number head} lines of {path}",
            "look at the first {number head} lines of {path}",
        ),
        verbs=("get",),
    ),
    Frame(
        "last lines",
        ("path", "number tail"),
        (
            "Show me the last {number tail} lines of {path}.",
            "What do the last {number tail} lines of {path} say?",
            "I only need the last {number tail} lines of {path}.",
        ),
        (
            "show me the last {number tail} lines of {path}",
            "tell me the last {number tail} lines of {path}",
            "look at the last {number tail} lines of {path}",
        ),
        verbs=("get",),
    ),
    Frame(
        "file facts",
        ("path",),
        (
            "What is the size of {path}?",
            "How big is {path}?",
            "I need the size of {path}.",
            "Which size does {path} have?",
            "Tell me how large {path} is.",
            "Can you check how big {path} is?",
        ),
        ("tell me how big {path} is", "check the size of {path}", "look up how large {path} is"),
        verbs=("get",),
        about=r"\b(?:info|information|stats?|metadata|details|size)\b",
        asks_for="size",
    ),
    Frame(
        "look into a folder with sizes",
        ("folder",),
        (
            "What is in {folder}, and how big is each file?",
            "Show me the files in {folder} and how large they are.",
            "I need the names and sizes of everything in {folder}.",
            "Which files are in {folder}, and what is the size of each?",
            "Tell me how large the files in {folder} are.",
            "How much room do the files in {folder} take?",
        ),
        (
            "show me the files in {folder} and their sizes",
            "tell me what is in {folder} and how big it is",
            "check how large the files in {folder} are",
        ),
        verbs=("list", "get"),
        about=r"\bsizes?\b",
    ),
    Frame(
        "folder tree",
        ("folder",),
        (
            "Show me everything in {folder}, with all folders inside it.",
            "What is in {folder}, including its subfolders?",
            "I need the whole tree of files below {folder}.",
            "Draw me the tree of {folder}.",
            "How are the folders in {folder} nested?",
            "List {folder} and all that is below it.",
        ),
        (
            "show me {folder} with all its subfolders",
            "show me the whole tree below {folder}",
            "tell me what is in {folder} and its subfolders",
        ),
        verbs=("list", "get"),
        about=r"\btree\b",
    ),
    Frame(
        "look into a folder",
        ("folder",),
        (
            "What is in the folder {folder}?",
            "Which files are in {folder}?",
            "Show me what {folder} contains.",
            "I'd like to see what is in {folder}.",
            "Tell me what there is in {folder}.",
            "Have a look at what is in the folder {folder}.",
        ),
        ("tell me what is in {folder}", "show me which files are in {folder}", "look at what {folder} contains"),
        verbs=("list", "get"),
        about=r"\b(?:directory|directories|folders?|files?|dir)\b",
    ),
    Frame(
        "find files",
        ("folder", "glob"),
        (
            "Which files in {folder} have a name like {glob}?",
            "Find everything in {folder} that matches {glob}.",
            "Are there files in {folder} that match {glob}?",
            "Look for {glob} in {folder}.",
            "I am looking for {glob} in the folder {folder}.",
            "Where below {folder} are files like {glob}?",
        ),
        ("look for {glob} in {folder}", "tell me what in {folder} matches {glob}", "see which files in {folder} are like {glob}"),
        verbs=("search", "list", "get"),
    ),
    Frame(
        "write a file",
        ("path", "sentence"),
        (
            'Save the text "{sentence}" in {path}.',
            'Put "{sentence}" into the file {path}.',
            'I need a file {path} that says "{sentence}".',
            'Make {path} with the text "{sentence}".',
            'Please note "{sentence}" in a new file called {path}.',
            'Store the words "{sentence}" as {path}.',
        ),
        ('save the text "{sentence}" in {path}', 'put "{sentence}" into the file {path}', 'make a file {path} that says "{sentence}"'),
        verbs=("write", "create", "add"),
    ),
    Frame(
        "make a folder",
        ("folder",),
        (
            "Make a new folder called {folder}.",
            "I need a folder {folder}.",
            "Please set up a folder named {folder}.",
            "Add an empty folder with the name {folder}.",
            "Can you make a folder {folder} for me?",
            "There should be a folder called {folder}.",
        ),
        ("make a folder called {folder}", "set up a new folder {folder}", "add a folder named {folder}"),
        verbs=("create", "write", "add"),
    ),
    Frame(
        "move a file",
        ("source path", "target path"),
        (
            "Rename {source path} to {target path}.",
            "Please move {source path} to {target path}.",
            "{source path} should be called {target path} from now on.",
            "Bring {source path} to {target path}.",
            "I want {source path} to become {target path}.",
            "Give {source path} the new place {target path}.",
        ),
        ("rename {source path} to {target path}", "move {source path} to {target path}", "bring {source path} to {target path}"),
        verbs=("move", "update"),
    ),
    Frame(
        "edit a text",
        ("path", "source sentence", "target sentence"),
        (
            'In {path}, replace "{source sentence}" with "{target sentence}".',
            'Change "{source sentence}" to "{target sentence}" in {path}.',
            'Wherever {path} says "{source sentence}", it should say "{target sentence}".',
        ),
        (
            'replace "{source sentence}" with "{target sentence}" in {path}',
            'change "{source sentence}" to "{target sentence}" in {path}',
            'put "{target sentence}" where {path} says "{source sentence}"',
        ),
        verbs=("update", "write"),
    ),
    Frame(
        "describe a table",
        ("table",),
        (
            "Which columns does the table {table} have?",
            "What does the table {table} look like?",
            "Show me the columns of {table}.",
            "How is the table {table} built?",
            "Tell me what columns there are in {table}.",
            "I need to know the columns of the table {table}.",
        ),
        ("tell me which columns {table} has", "show me the columns of {table}", "look up how the table {table} is built"),
        verbs=("get", "list"),
        about=r"\b(?:table|schema|columns?)\b",
    ),
    Frame(
        "relation",
        ("relation", "source name", "target name"),
        (
            'Note that "{source name}" {relation} "{target name}".',
            'Remember that "{source name}" {relation} "{target name}".',
            'Keep in mind: "{source name}" {relation} "{target name}".',
            'Please record that "{source name}" {relation} "{target name}".',
            'Write down that "{source name}" {relation} "{target name}".',
            'You should know that "{source name}" {relation} "{target name}".',
        ),
        (
            'note that "{source name}" {relation} "{target name}"',
            'record that "{source name}" {relation} "{target name}"',
            'remember that "{source name}" {relation} "{target name}"',
        ),
        verbs=("create", "add", "write", "update"),
    ),
    Frame(
        "relation gone",
        ("relation", "source name", "target name"),
        (
            'It is no longer true that "{source name}" {relation} "{target name}". Forget it.',
            'Forget that "{source name}" {relation} "{target name}".',
            'Take out that "{source name}" {relation} "{target name}".',
        ),
        (
            'forget that "{source name}" {relation} "{target name}"',
            'take out that "{source name}" {relation} "{target name}"',
            'strike that "{source name}" {relation} "{target name}"',
        ),
        verbs=("delete",),
    ),
    Frame(
        "new thing with facts",
        ("category", "name", "sentence"),
        (
            'Remember the {category} "{name}": {sentence}.',
            'There is something to note, the {category} "{name}", with the remark "{sentence}".',
            'Note a new {category}, "{name}", with the remark "{sentence}".',
            'Keep the {category} "{name}" in mind. Remark: "{sentence}".',
            'Please put down the {category} "{name}" with the words "{sentence}".',
            'I want you to know about the {category} "{name}": {sentence}.',
        ),
        (
            'remember the {category} "{name}" with the remark "{sentence}"',
            'note the {category} "{name}" ("{sentence}")',
            'put down the {category} "{name}" with "{sentence}"',
        ),
        verbs=("create", "add", "write"),
    ),
    Frame(
        "fact about a name",
        ("name", "sentence"),
        (
            'Keep in mind that "{name}" {sentence}.',
            'About "{name}": {sentence}. Please remember that too.',
            'Note down for "{name}": "{sentence}".',
            'One more thing about "{name}": {sentence}.',
            'Also remember about "{name}": "{sentence}".',
            'Put "{sentence}" down for "{name}".',
        ),
        ('note for "{name}": "{sentence}"', 'put down "{sentence}" for "{name}"', 'remember about "{name}": "{sentence}"'),
        verbs=("add", "write", "update", "create"),
    ),
    Frame(
        "fact gone",
        ("name", "sentence"),
        (
            '"{sentence}" is no longer true of "{name}". Take it out.',
            'Forget "{sentence}" about "{name}".',
            'Strike "{sentence}" from what you know of "{name}".',
        ),
        ('forget "{sentence}" about "{name}"', 'take "{sentence}" away from "{name}"', 'strike "{sentence}" from "{name}"'),
        verbs=("delete",),
    ),
    Frame(
        "thing gone",
        ("name",),
        ('Forget "{name}".', 'I no longer need "{name}". Take it away.', 'Strike "{name}" out.'),
        ('forget "{name}"', 'take "{name}" away', 'strike "{name}" out'),
        verbs=("delete",),
    ),
    Frame(
        "about a name",
        ("name",),
        (
            'What do you know about "{name}"?',
            'Tell me about "{name}".',
            'Show me what is known about "{name}".',
            'What is there on "{name}"?',
            'Look up "{name}" for me.',
            'I need everything about "{name}".',
        ),
        ('tell me about "{name}"', 'look up "{name}"', 'show me what is known about "{name}"'),
        verbs=("get", "search"),
    ),
    Frame(
        "mail",
        ("email", "sentence"),
        (
            'Write to {email}: "{sentence}".',
            'Let {email} know: "{sentence}".',
            'Please tell {email} "{sentence}".',
            '{email} should get the message "{sentence}".',
            'Drop {email} a line: "{sentence}".',
            'I want {email} to read this: "{sentence}".',
        ),
        ('write "{sentence}" to {email}', 'let {email} know "{sentence}"', 'tell {email} "{sentence}"'),
        verbs=("send", "create", "write", "other"),
    ),
    Frame(
        "note a sentence",
        ("sentence",),
        (
            'Make a note: "{sentence}".',
            'Please keep this {one}: "{sentence}".',
            "Write down that {sentence}.",
            'I found out something: "{sentence}". Keep it.',
            'Here is a new {one}: "{sentence}".',
            'Remember this: "{sentence}".',
        ),
        ('make a note that says "{sentence}"', 'keep the {one} "{sentence}"', 'write down "{sentence}"'),
        verbs=("add", "write", "create", "send"),
    ),
    Frame(
        "say a sentence",
        ("sentence",),
        ('Say "{sentence}" back to me.', 'Repeat "{sentence}".', 'Send "{sentence}" and tell me what comes back.'),
        ('repeat "{sentence}"', 'say "{sentence}" back to me', 'send "{sentence}" and tell me what comes back'),
        verbs=("get", "other"),
    ),
    Frame(
        "search",
        ("search",),
        (
            "Is there anything about {search}?",
            "Find what has to do with {search}.",
            "Where does {search} come up?",
            "What do we have on {search}?",
            "Look for {search}.",
            "Which {objects} mention {search}?",
        ),
        ("look for {search}", "find what mentions {search}", "see what there is about {search}"),
        verbs=("search", "get", "list"),
    ),
    Frame(
        "everything",
        (),
        (
            "Which {objects} are there?",
            "Show me all {objects}.",
            "What {objects} do we have?",
            "I'd like an overview of the {objects}.",
            "Tell me which {objects} there are.",
            "Give me every one of the {objects}.",
        ),
        ("tell me which {objects} there are", "show me all {objects}", "give me an overview of the {objects}"),
        verbs=("list", "search"),
    ),
    Frame(
        "the thing",
        (),
        (
            "Show me the {object}.",
            "What does the {object} look like?",
            "I'd like to see the {object}.",
            "What is in the {object}?",
            "Let me have a look at the {object}.",
            "Tell me what the {object} says.",
        ),
        ("show me the {object}", "tell me what is in the {object}", "let me see the {object}"),
        verbs=("get",),
    ),
)
"""The first frame that fits a call is used."""
