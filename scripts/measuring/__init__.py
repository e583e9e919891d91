"""What the benchmarks are made of: contenders, clocks, rooflines, tables and plots."""
