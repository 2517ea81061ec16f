"""SGLang behind the rollout protocol.

rank process                                launcher process (own session)       SGLang's own processes
SglangEngine -> EngineProcess --channel--> launcher -> sglang.Engine ----------> scheduler, one per TP rank
     ^                                                                              | parameters
     +------------- the parameters' memory, mapped (CUDA IPC, memory file) <--------+

Only `launcher`, `scheduler`, `plugin`, `exporter` and `versions` import sglang, and they run in the launcher or
below; a rank never does (importing sglang replaces the event-loop policy, and a failing scheduler signals its
parent).
"""
