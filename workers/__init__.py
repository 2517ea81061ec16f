"""What runs on an accelerator: rank actors, FSDP2 models, rollout engines."""
