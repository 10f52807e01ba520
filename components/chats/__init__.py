"""Chats as every stage passes them on: rows in JSONL shards, and the one way to render a prompt."""
