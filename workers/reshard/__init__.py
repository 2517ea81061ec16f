"""The reshard plan on torch.distributed: from FSDP2 shards straight into an engine's parameter memory.

`transition.Transition` is what a rank uses; `executor` runs a plan, `wire` counts what arrives,
`bucket` bounds the extra memory, `placements` is FSDP2's side of TP-aligned sharding.
"""
