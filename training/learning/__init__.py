"""Heads that learn from the texts that they help to decode."""
