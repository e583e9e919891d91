"""Conversations that a target writes, for heads to learn from."""
