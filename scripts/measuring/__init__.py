"""The parts of the measuring programs: contenders, rooflines, tables, files of results."""
