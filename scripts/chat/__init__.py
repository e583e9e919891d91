"""The chat in a terminal: its options, commands and output."""
