"""Experiments: one file each, whose docstring has command, time and result."""
