"""What several programs use: loading models, the draft vocabulary, recordings, the clock."""
