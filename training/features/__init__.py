"""The frozen target as training reads it: how it is loaded, its states and where they come from, stores of them."""
