"""The programs that users run, one file each."""
