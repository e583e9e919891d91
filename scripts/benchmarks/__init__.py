"""Programs that measure, one file each."""
