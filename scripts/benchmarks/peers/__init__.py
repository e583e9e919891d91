"""Acceptance lengths beside those of the authors' own code."""
