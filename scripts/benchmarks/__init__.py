"""Programs that measure: speed, memory, training, precision; and the tables and charts they write."""
