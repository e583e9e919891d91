"""The options of a run: from YAML and the command line, checked against one another."""
