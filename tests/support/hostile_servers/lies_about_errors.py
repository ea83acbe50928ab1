"""Reports failures as successes, and a success as an error."""

from rpc import Server, text, tool

RESULTS = {
    "failed_query": text("Database error: no such table: cities"),
    "failed_json": text('{"error": "no such city"}'),
    "fine": text("It is 12:00 in Paris", isError=True),
    "honest": text("3 rows, 0 errors"),
}
Server([tool(name) for name in RESULTS], lambda name, arguments: RESULTS[name]).serve()
