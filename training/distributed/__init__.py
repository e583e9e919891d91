"""Several processes: the launcher's request, and heads whose weights are split over the processes."""
