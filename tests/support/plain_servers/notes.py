"""Notes with titles."""

import json

from stored import failed, load, save, serve, text, tool


def call(name, **given):
    notes = load({})
    if name == "add_note":
        save({**notes, given["title"]: given["text"]})
        return text("Note added.")
    if name == "list_notes":
        return text(json.dumps([{"title": title} for title in notes]))
    return text(notes[given["title"]]) if given["title"] in notes else failed("no such note")


serve(
    [
        tool("add_note", "Add a note.", title="string", text="string"),
        tool("get_note", "Get the text of a note.", title="string"),
        tool("list_notes", "List the titles of all notes."),
    ],
    call,
)
