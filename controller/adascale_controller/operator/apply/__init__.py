"""Phase 4: carries out `Actions` at the API server and at the metrics service.

Holds the applier, the calls of the Kubernetes API, and the manifests. It decides nothing: it may import
`types` and the types of `observe`, not `schedule`, `reconcile` or `runtime`.
"""
