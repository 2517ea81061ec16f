"""Who sends which rows to whom, from FSDP2 shards to a rollout engine's parameters (paper section 5).

`sources` says where training keeps a parameter, `engine_layout` where the engine wants it, `plan` joins
the two. Plain data: nothing here needs torch. `workers.reshard` executes a plan.
"""
