"""Several processes: what the launcher asked for, and heads whose weights are split over the processes."""
