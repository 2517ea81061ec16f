"""Prefect flows and tasks, and the command line."""
