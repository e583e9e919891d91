"""A run's report and model card, from plain data."""
