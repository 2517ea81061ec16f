"""What the commands of `flows.cli` do; each module is imported when its command runs."""
