"""Phase 3: computes the `Actions` for one job from its `ObservedJob` and its replica count.

Pure: no calls, no clock, no asyncio, no Kubernetes client, no memory between cycles (what must survive a
restart is in the status). It may import `observe` and `types`, not `schedule`, `apply` or `runtime`.
"""
