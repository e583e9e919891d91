"""Scripted acceptance: targets that count, and drafts that are right as often as one asks."""
