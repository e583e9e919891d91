"""A training run: prepared, trained, measured, saved, resumed."""
