"""A list of tasks: the id of a new one is told when it is made."""

from stored import failed, load, save, serve, text, tool


def call(name, title="", id=0):
    tasks = load([])
    if name == "add_task":
        tasks.append({"id": len(tasks) + 1, "title": title, "done": False})
        save(tasks)
        return text(f"Added task {len(tasks)}: {title}")
    if name == "complete_task":
        found = [task for task in tasks if task["id"] == id]
        if not found:
            return failed(f"there is no task {id}")
        found[0]["done"] = True
        save(tasks)
        return text(f"Task {id} is done.")
    lines = [f"{task['id']}. [{'x' if task['done'] else ' '}] {task['title']}" for task in tasks]
    return text("\n".join(lines) or "No tasks.")


serve(
    [
        tool("add_task", "Add a task to the list.", title="string"),
        tool("complete_task", "Mark a task as done.", id="integer"),
        tool("list_tasks", "List all tasks."),
    ],
    call,
)
