"""Phase 1: reads cached objects and lookup results into one typed `ObservedJob` for each AdaScaleJob.

Pure: no calls, no clock (the time is an argument), no asyncio, no Kubernetes client. It may import `types`
and nothing of the later phases. What is not in the caches (claims, Events) is fetched by
`runtime.lookup_fetcher` before a job is observed.
"""
