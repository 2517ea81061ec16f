"""The typed configuration: importable without torch."""
