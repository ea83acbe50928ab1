"""MCP servers as training grounds: isolated sessions, executed scenarios, checks, and the mastery run."""
