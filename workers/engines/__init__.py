"""Rollout engines: one narrow protocol (`base`), one compliance suite that each engine passes."""
