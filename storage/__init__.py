"""Rollouts in Zarr, checkpoints, the run directory and reports."""
