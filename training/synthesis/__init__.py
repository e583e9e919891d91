"""Conversations that a target writes: to learn from, ahead of a run or within it."""
