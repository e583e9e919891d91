"""The parts of the measuring programs: contenders, clocks, rooflines, tables and plots."""
