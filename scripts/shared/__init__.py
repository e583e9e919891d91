"""What several programs use: loading models, errors in one line, whole files, recordings, the clock."""
