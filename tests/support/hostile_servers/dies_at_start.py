"""Fails before it says a word, as a server built for another version of its library does."""

from mcp_of_another_age import FastMCP  # noqa: F401
